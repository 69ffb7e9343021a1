"""``--threads`` reaches the device's plugin and the CPU plugins behind it."""

from __future__ import annotations

import pytest
import qiao_reference
from qiao.build import set_threads
from qiao.errors import ParameterError
from qiao.registry.backend import backend_of


def test_each_plugin_that_has_the_hook_is_told_once(monkeypatch, caplog):
    told = []
    monkeypatch.setattr("torch.set_num_threads", told.append)
    monkeypatch.setattr("qiao_reference.threads.granted_cpus", lambda: 8)
    set_threads(backend_of(qiao_reference, "reference"), 3)
    assert told == [3]
    with caplog.at_level("INFO", logger="qiao.build"):
        set_threads(backend_of(qiao_reference, "reference"), None)
    assert "reference: " in caplog.text and "torch threads" in caplog.text


def test_a_number_that_a_plugin_refuses_is_the_users_mistake():
    with pytest.raises(ParameterError, match=r"threads: .*at least 1"):
        set_threads(backend_of(qiao_reference, "reference"), 0)
