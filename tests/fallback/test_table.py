"""Whatever a plugin lacks: the same tokens, and exactly the copies and bytes that the plan has priced."""

from __future__ import annotations

from itertools import combinations

import pytest
from qiao.contract import CATALOG
from qiao.registry import FallbackCounters, bind
from qiao.registry.placement import Kind

from tests.support.fallback import Crossing, expected, host_backend, plan_for, serve, sim_backend

LACKABLE = [op.name for op in CATALOG.values() if op.family != "device" or op.optional]

GROUPS = {
    "KV": ("allocate_kv", "copy_blocks", "write_kv", "attention", "decode_attention", "rope_write_kv"),
    "W[dense]": ("pack_weight", "matmul"),
    "S": ("sample",),
}

MOVED = {
    **{hook: {"KV"} for hook in ("allocate_kv", "copy_blocks", "write_kv", "attention")},
    **{hook: {"W[dense]"} for hook in ("pack_weight", "matmul")},
    "sample": {"S"},
}
"""The groups that each required hook takes with it; an optional hook moves nothing."""


def check(label, missing, moved, table_row):
    backend = sim_backend(missing)
    plan = plan_for(backend)
    counters = FallbackCounters()
    served = serve(bind(plan, backend, counters), counters)
    priced = [Crossing.priced(plan, crossing.step) for crossing in served.crossings]
    same = served.tokens == expected()
    on_host = {p.group for p in plan.placements if p.kind is Kind.HOST}
    table_row(
        label,
        ", ".join(sorted(on_host)) or "-",
        len(priced),
        sum(p.copies_to_host + p.copies_to_device for p in priced),
        sum(c.copies_to_host + c.copies_to_device for c in served.crossings),
        sum(p.bytes_to_host + p.bytes_to_device for p in priced),
        sum(c.bytes_to_host + c.bytes_to_device for c in served.crossings),
        "equal" if same else "DIFFERENT",
    )
    assert served.errors == {}
    assert same, f"{served.tokens} instead of {expected()}"
    assert served.crossings == priced  # step by step, each way
    assert on_host == moved
    check_counters(plan, served)


def check_counters(plan, served):
    """The counters that Prometheus shows are the plan's rows summed over the steps."""
    wanted = {}
    for crossing in served.crossings:
        for row in plan.price(crossing.step).rows:
            if row.kind is Kind.HOST and row.price.calls:
                sums = wanted.setdefault(row.operator, [0, 0, 0])
                for i, value in enumerate((row.price.calls, row.price.bytes_to_host, row.price.bytes_to_device)):
                    sums[i] += value
    counted = {
        r.operator: [r.calls, r.bytes_to_host, r.bytes_to_device]
        for r in served.counters.snapshot()
        if r.operator in wanted
    }
    assert counted == wanted


def test_the_steps_cover_prefill_mixed_and_decode():
    backend = sim_backend()
    steps = [c.step for c in serve(bind(plan_for(backend), backend, FallbackCounters())).crossings]
    assert any(s.logits == 0 for s in steps)  # a chunk of a prompt only
    assert any(s.tokens > s.seqs > 1 for s in steps)  # prompts and decodes mixed
    assert any(s.tokens == s.seqs > 2 for s in steps)  # all decode


def test_the_cpu_gives_the_same_tokens_as_transformers():
    backend = host_backend()
    plan = plan_for(backend)
    served = serve(bind(plan, backend, FallbackCounters()))
    assert served.tokens == expected()
    assert plan.price().total.copies == 0
    assert all(c.copies_to_host == c.copies_to_device == 0 for c in served.crossings)


def test_nothing_left_out(table_row):
    check("nothing", (), set(), table_row)


@pytest.mark.parametrize("hook", LACKABLE)
def test_each_hook_left_out(hook, table_row):
    check(hook, (hook,), MOVED.get(hook, set()), table_row)


@pytest.mark.parametrize("groups", [c for n in (1, 2, 3) for c in combinations(GROUPS, n)], ids=" + ".join)
def test_groups_left_out(groups, table_row):
    missing = [hook for group in groups for hook in GROUPS[group]]
    check(" + ".join(groups), missing, set(groups), table_row)


@pytest.mark.parametrize("drop", [("attention",), ("KV", "S"), ("W[dense]", "rms_norm")], ids=" ".join)
def test_dropping_is_the_same_as_lacking(drop):
    backend = sim_backend()
    plan = plan_for(backend, drop=drop)
    counters = FallbackCounters()
    served = serve(bind(plan, backend, counters), counters)
    assert served.tokens == expected()
    assert served.crossings == [Crossing.priced(plan, c.step) for c in served.crossings]
