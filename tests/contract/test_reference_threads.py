"""Torch's threads, by number and by default."""

from __future__ import annotations

import pytest
import qiao_reference
import torch
from qiao_reference import threads as module


@pytest.fixture
def torch_threads(monkeypatch):
    """Records what torch is told, and says that it would take 6 threads."""
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    return told


def test_torch_gets_the_number_its_own_default_or_what_is_allowed(monkeypatch, torch_threads):
    monkeypatch.setattr(module, "granted_cpus", lambda: 4)
    assert qiao_reference.set_threads(3) == "3 torch threads"
    assert qiao_reference.set_threads(None) == "4 torch threads; no more than 4 are allowed"
    assert qiao_reference.set_threads(9) == "4 torch threads; no more than 4 are allowed"
    monkeypatch.setattr(module, "granted_cpus", lambda: 8)
    assert qiao_reference.set_threads(None) == "6 torch threads"
    assert torch_threads == [3, 4, 4, 6]
    with pytest.raises(ValueError, match="at least 1"):
        qiao_reference.set_threads(0)
