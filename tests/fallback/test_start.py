"""The start-up probe: what a chip turns out not to have is replaced before the first request, and said once (B097)."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch
from qiao.contract import CATALOG, MemoryInfo
from qiao.errors import PlanRefusedError, PluginError
from qiao.registry import FallbackCounters, Policy, confirm, enforce, make_plan
from qiao.registry.backend import make_backend
from qiao.registry.manager import LoadedPlugin
from qiao.registry.placement import Kind
from qiao_conformance import sim

from tests.support.fallback import BLOCK, Crossing, expected, host_backend, plan_for, serve, shape, sim_backend

NEVER = ("gelu_mul", "cap_logits", "swap_blocks", "expert_matmul", "route_experts", "combine_experts")
"""What a Llama never calls."""

USED = [op.name for op in CATALOG.values() if op.family != "device" and op.name not in NEVER]


def lacking(name, error=NotImplementedError):
    """The simulated device with a hook that is there but raises, as on a chip that lacks the operator."""

    def hook(*args):
        raise error(f"{name} is not supported on this chip")

    backend = sim_backend()
    return make_backend(LoadedPlugin("sim", {**backend.hooks, name: hook}), backend.device, backend.host)


def test_a_device_that_keeps_its_word_keeps_its_plan():
    backend = sim_backend()
    plan, counters = plan_for(backend), FallbackCounters()
    confirmed, table = confirm(plan, backend, counters)
    assert confirmed is plan
    assert serve(table).tokens == expected()
    assert counters.snapshot() == []


@pytest.mark.parametrize("hook", USED)
def test_each_operator_that_the_chip_lacks_is_replaced_at_start(hook, caplog):
    backend = lacking(hook)
    counters = FallbackCounters()
    plan, table = confirm(plan_for(backend), backend, counters)
    reason = f"probe raised NotImplementedError: {hook} is not supported on this chip"
    assert plan.placement(hook, "dense" if CATALOG[hook].group == "W" else "").reason == reason
    assert all(r.calls == 0 for r in counters.snapshot())  # the probe itself does not count
    enforce(plan, Policy.parse("warn"))
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and reason in r.getMessage()]
    assert len(said) == 1 and hook in said[0] and "sim:0" in said[0]
    served = serve(table, counters)
    assert served.errors == {} and served.tokens == expected()
    assert served.crossings == [Crossing.priced(plan, c.step) for c in served.crossings]


WRONG = {
    "allocate_kv": lambda cache: (cache.key, cache.value),
    "attention": lambda out: None,
    "decode_attention": lambda out: out.flatten(1),
    "pack_weight": lambda packed: packed.data,
    "matmul": lambda out: out.double() if out.dtype != torch.float64 else out,
    "sample": lambda ids: ids[:, None],
    "apply_penalties": lambda logits: None,
    "logprobs": lambda out: (out.chosen, out.rank, out.top_ids, out.top_values),
    "rms_norm": lambda out: (out, out),
    "add_rms_norm": lambda pair: pair[0],
    "rotary": lambda pair: (pair[0], pair[1][:-1]),
    "silu_mul": lambda out: out.repeat(1, 2),
    "rope_write_kv": lambda query: (query, query),
}
"""What a vendor may return by mistake in place of what the contract asks for."""


@pytest.mark.parametrize("hook", WRONG)
def test_a_result_of_a_wrong_kind_is_found_at_start(hook):
    backend = sim_backend()
    right = backend.hooks[hook]
    hooks = {**backend.hooks, hook: lambda *args: WRONG[hook](right(*args))}
    backend = make_backend(LoadedPlugin("sim", hooks), backend.device, backend.host)
    plan, table = confirm(plan_for(backend), backend, FallbackCounters())
    reason = plan.placement(hook, "dense" if CATALOG[hook].group == "W" else "").reason
    assert "returned" in reason and "the contract asks for" in reason
    assert serve(table).tokens == expected()


@pytest.mark.parametrize(
    ("hook", "function"),
    [
        ("memory_info", lambda device: 1 / 0),
        ("memory_info", lambda device: (1, 2)),
        ("memory_info", lambda device: MemoryInfo(2, 1)),
        ("memory_info", lambda device: MemoryInfo(-1, 1)),
        ("synchronize", lambda device: 1 / 0),
    ],
)
def test_a_device_that_cannot_be_asked_is_not_started(hook, function):
    backend = sim_backend()
    backend = make_backend(LoadedPlugin("sim", {**backend.hooks, hook: function}), backend.device, backend.host)
    with pytest.raises(PluginError, match=f"cannot start on sim:0: {hook} of sim"):
        confirm(plan_for(backend), backend, FallbackCounters())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtypes": ()}, "dtypes is empty"),
        ({"dtypes": "float32"}, "must be a tuple"),
        ({"dtypes": (torch.float32,)}, "torch.float32 is no dtype"),
        ({"kv_dtypes": ("f32",)}, "'f32' is no dtype"),
        ({"kv_layouts": ("NDH",)}, "'NDH' is unknown"),
        ({"block_sizes": (0,)}, "got 0"),
        ({"head_dims": ("64",)}, "got '64'"),
    ],
)
def test_capabilities_that_mean_nothing_are_refused(changes, said):
    backend = sim_backend()
    hooks = {**backend.hooks, "capabilities": lambda chip: replace(backend.capabilities, **changes)}
    with pytest.raises(PluginError, match=f"capabilities failed: .*{said}"):
        make_backend(LoadedPlugin("sim", hooks), backend.device, backend.host)


def test_all_operators_at_once():
    backend = sim_backend()
    broken = {name: lacking(name).hooks[name] for name in USED}
    backend = make_backend(LoadedPlugin("sim", {**backend.hooks, **broken}), backend.device, backend.host)
    plan, table = confirm(plan_for(backend), backend, FallbackCounters())
    assert {p.group for p in plan.placements if p.kind is Kind.HOST} == {"KV", "W[dense]", "S"}
    assert serve(table).tokens == expected()


def test_deny_refuses_what_the_probe_found():
    backend = lacking("attention")
    policy = Policy.parse("deny")
    plan = make_plan(shape(), backend, policy, block_size=BLOCK)
    enforce(plan, policy)  # declared support alone is fine
    confirmed, _ = confirm(plan, backend, FallbackCounters())
    with pytest.raises(PlanRefusedError, match=re.escape("attention (probe raised NotImplementedError")):
        enforce(confirmed, policy)


def test_a_late_fault_is_found_by_waiting():
    backend = sim_backend()
    sim.fail("hook.silu_mul", late=True)
    plan, _ = confirm(plan_for(backend), backend, FallbackCounters())
    assert "launch failed (injected)" in plan.placement("silu_mul").reason


def test_what_has_no_other_place_stops_the_start():
    """The host's own operator raises: nothing is left to turn to."""
    host = host_backend()

    def attention(query, cache, metadata, scale, sliding_window, soft_cap):
        raise RuntimeError("host bug")

    broken = make_backend(LoadedPlugin("reference", {**host.hooks, "attention": attention}), host.device, None)
    device = sim_backend(("attention",))
    backend = make_backend(LoadedPlugin("sim", device.hooks), device.device, broken)
    with pytest.raises(PluginError, match=r"cannot start on sim:0: attention of reference .*host bug"):
        confirm(plan_for(backend), backend, FallbackCounters())


def test_the_host_alone_fails_plainly():
    host = host_backend()

    def matmul(x, weight, bias):
        raise RuntimeError("no instruction set for this")

    broken = make_backend(LoadedPlugin("reference", {**host.hooks, "matmul": matmul}), host.device, None)
    with pytest.raises(PluginError, match=r"matmul .*no instruction set"):
        confirm(plan_for(broken), broken, FallbackCounters())


def test_out_of_memory_is_not_taken_for_a_missing_operator():
    backend = lacking("attention", torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        confirm(plan_for(backend), backend, FallbackCounters())


@pytest.mark.parametrize("chip", ["nobf16", "hnd", "nowindow", "nosample", "bare"])
def test_every_simulated_chip(chip):
    """Chips that differ in dtypes, layouts, schemes and hooks all serve the same tokens."""
    from qiao_conformance.sim.chips import CHIPS

    backend = sim_backend(CHIPS[chip].missing, chip=chip)
    counters = FallbackCounters()
    plan, table = confirm(plan_for(backend), backend, counters)
    served = serve(table, counters)
    assert served.tokens == expected()
    assert served.crossings == [Crossing.priced(plan, c.step) for c in served.crossings]
