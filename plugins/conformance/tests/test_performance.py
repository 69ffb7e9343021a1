"""The performance mode: every hook that computes is measured, and what it moves is counted from the shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from qiao.contract import CATALOG
from qiao_conformance import drawn, performance
from qiao_conformance.target import find


@pytest.fixture
def small():
    target = find("reference")
    facts = replace(target.capabilities, dtypes=("bfloat16",), kv_dtypes=("bfloat16",), schemes=("dense", "w4a16"))
    return replace(target, capabilities=facts)


def bytes_of(target, hook, label=""):
    case = next(c for c in performance.cases(hook, target.capabilities) if label in c.id)
    measured = performance.measure(target, case)
    assert measured.microseconds > 0 and measured.calls >= 3
    assert measured.bytes_per_second == pytest.approx(measured.bytes / measured.microseconds * 1e6)
    return measured.bytes


def test_every_hook_that_is_drawn_is_measured(small):
    hooks = {h for h in CATALOG if drawn.recipes(h, small.capabilities) is not None}
    assert {h for h in hooks if any(True for _ in performance.cases(h, small.capabilities))} == hooks


def test_bytes_are_those_of_operands_and_results(small, monkeypatch):
    monkeypatch.setattr(performance, "SECONDS", 0.01)
    assert bytes_of(small, "silu_mul") == 2 * 16 * 14_336 * 3
    assert bytes_of(small, "rms_norm") == 2 * (2 * 16 * 4096 + 4096)
    assert bytes_of(small, "cap_logits") == 2 * 4 * 16 * 32_000
    assert bytes_of(small, "matmul", "dense-4096x4096-1tokens") == 2 * (4096 * 4096 + 2 * 4096)
    experts = 8 * 1024 * 2048 + 32 * (2048 + 1024)
    assert bytes_of(small, "expert_matmul", "dense") == 2 * experts + 8 * 32
    cached = 2 * 2 * 16 * 1024 * 8 * 128  # keys and values of 16 contexts, not of the whole cache
    moved = bytes_of(small, "decode_attention") - cached
    assert 2 * 2 * 16 * 32 * 128 <= moved < 2 * 2 * 16 * 32 * 128 + 10_000  # queries, results, tables


def test_slower_is_measured_as_slower(small, monkeypatch):
    """Nothing is asserted about this machine: the clock is a counter."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(performance.time, "perf_counter", lambda: next(ticks) * 1e-3)
    case = next(performance.cases("silu_mul", small.capabilities))
    measured = performance.measure(small, case)
    assert measured.microseconds == pytest.approx(1000)
    assert measured.bytes_per_second == pytest.approx(measured.bytes * 1000)
