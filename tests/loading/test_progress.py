"""What a long load says where there is no terminal."""

from __future__ import annotations

import logging

import pytest
from qiao.loading.weights import with_log


def test_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]

    def clock() -> float:
        return now[0]

    def slow() -> object:
        for i in range(30):
            yield i
            now[0] += 1.0

    with caplog.at_level(logging.INFO, "qiao.loading.weights"):
        assert list(with_log(slow(), 30, clock)) == list(range(30))
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights: 10 of 30 tensors",
        "loading weights: 20 of 30 tensors",
    ]
