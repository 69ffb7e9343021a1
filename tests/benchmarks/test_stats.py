"""Figures of runs, against numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.comparison.stats import Timing, median_of, percentile, pooled_ttft, summarise
from tests.benchmarks.data import request


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(float(np.percentile(values, share)), rel=1e-9, abs=1e-9)


def test_a_run_by_hand() -> None:
    timings = [
        Timing(ttft=0.5, last=1.5, seconds=1.6, prompt_tokens=100, completion_tokens=11, gaps=[0.1] * 10),
        Timing(ttft=1.5, last=5.5, seconds=5.6, prompt_tokens=100, completion_tokens=21, gaps=[0.2] * 20),
        Timing(error="status 500", seconds=0.1),
    ]
    figures = summarise(timings, wall=8.0)
    assert (figures["completed"], figures["failed"], figures["errors"]) == (2, 1, ["status 500"])
    assert figures["output_rate"] == pytest.approx(32 / 8)
    assert figures["tpot_ms"] == pytest.approx((100 + 200) / 2)  # 1 s over 10 tokens, 4 s over 20
    assert figures["decode_rate"] == pytest.approx(1 / 0.15)
    assert figures["ttft_mean_ms"] == pytest.approx(1000)
    assert figures["ttft_p95_ms"] == pytest.approx(1450)
    assert figures["prefill_rate"] == pytest.approx((100 / 1.6 + 100 / 5.6) / 2)
    assert figures["itl_p95_ms"] == pytest.approx(200)


def test_one_token_has_no_decode_rate_and_failures_have_no_figures() -> None:
    single = summarise([Timing(ttft=0.2, last=0.2, seconds=0.25, prompt_tokens=1000, completion_tokens=1)], 0.25)
    assert single["decode_rate"] is None and single["prefill_rate"] == pytest.approx(4000)
    failed = summarise([Timing(error="x")], 1.0)
    assert failed["output_rate"] == 0 and failed["ttft_mean_ms"] is None and failed["prefill_rate"] is None


def test_median_of_leaves_out_rounds_without_the_figure() -> None:
    assert median_of([{"a": 1.0}, {"a": None}, {}, {"a": 5.0}, {"a": 2.0}], "a") == 2.0
    assert median_of([{}], "a") is None


def test_first_tokens_are_pooled_over_rounds_without_failures() -> None:
    rounds = [{"requests": [request(100.0), request(300.0)]}, {"requests": [request(200.0), request(9e9, "failed")]}]
    assert pooled_ttft(rounds) == pytest.approx((200.0, 290.0))
    assert pooled_ttft([{"requests": [request(None)]}]) is None
