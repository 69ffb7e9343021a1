"""A kernel that raises fails its request, names itself, and is never replaced by a slow copy of itself on the CPU."""

from __future__ import annotations

import sys

import pytest
import torch
from qiao.errors import KernelError, PluginError
from qiao.optable import operator_of
from qiao.registry import FallbackCounters, backend_of, bind
from qiao.registry.backend import make_backend
from qiao.registry.manager import LoadedPlugin
from qiao_conformance import sim

from tests.support.fallback import PROMPTS, build, expected, host_backend, plan_for, request, sim_backend

DEVICE_HOOKS = ["attention", "decode_attention", "rope_write_kv", "matmul", "sample", "add_rms_norm", "silu_mul"]


def drive(engine):
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def start(backend, **options):
    counters = FallbackCounters()
    table = bind(plan_for(backend, **options), backend, counters)
    return build(table, counters)[0], table, counters


@pytest.mark.parametrize("hook", DEVICE_HOOKS)
def test_a_kernel_that_raises_fails_its_request_and_the_next_one_works(hook):
    engine, _, counters = start(sim_backend())
    sim.fail(f"hook.{hook}")
    engine.add_request(request("bad", PROMPTS[1]))
    last = drive(engine)[-1]
    assert last.finish_reason == "error"
    assert "launch failed (injected)" in last.error
    assert f"operator {hook} on sim:0" in last.error
    assert counters.snapshot() == []  # nothing ran on the host
    engine.add_request(request("1", PROMPTS[1]))
    assert [t for o in drive(engine) for t in o.token_ids] == expected()["1"]
    engine.check_integrity()


@pytest.mark.parametrize("hook", DEVICE_HOOKS)
def test_the_operator_is_named(hook):
    """At the level of the table: the function that raised is found without wrapping it."""
    backend = sim_backend()
    table = bind(plan_for(backend), backend, FallbackCounters())

    def boom(*args):
        raise RuntimeError("injected")

    function = getattr(table, hook) if hook != "matmul" else table.matmul["dense"].matmul
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    try:
        function(*[None] * len(names))
    except Exception as error:
        assert operator_of(table, error) == hook
    else:
        pytest.fail("None is no tensor")
    try:
        boom()
    except RuntimeError as error:
        assert operator_of(table, error) is None


def test_a_late_fault_surfaces_too():
    engine, _, counters = start(sim_backend())
    sim.fail("hook.attention", late=True)
    engine.add_request(request("bad", PROMPTS[1]))
    last = drive(engine)[-1]
    assert last.finish_reason == "error" and "injected" in last.error
    assert counters.snapshot() == []


def test_a_fault_in_a_copy_of_a_fallback_fails_the_request():
    engine, _, _ = start(sim_backend(("attention",)))
    sim.fail("copy.d2h")
    engine.add_request(request("bad", PROMPTS[1]))
    last = drive(engine)[-1]
    assert last.finish_reason == "error"
    assert "write_kv of plugin reference" in last.error and "copy.d2h: launch failed (injected)" in last.error
    engine.add_request(request("1", PROMPTS[1]))
    assert [t for o in drive(engine) for t in o.token_ids] == expected()["1"]


def with_host_hook(name, function):
    """A simulated device without the operator ``name``, whose host has ``function`` for it."""
    host = host_backend()
    broken = make_backend(LoadedPlugin("reference", {**host.hooks, name: function}), host.device, None)
    device = sim_backend((name,))
    return make_backend(LoadedPlugin("sim", device.hooks), device.device, broken)


def test_a_host_kernel_that_raises_is_a_kernel_error_with_its_cause():
    def attention(query, cache, metadata, scale, sliding_window, soft_cap):
        raise ZeroDivisionError("host bug")

    backend = with_host_hook("attention", attention)
    engine, table, _ = start(backend)
    with pytest.raises(
        KernelError, match=r"attention of plugin reference failed on cpu for sim:0: ZeroDivisionError: host bug"
    ):
        table.attention(*[torch.zeros(1)] * 6)
    engine.add_request(request("bad", PROMPTS[1]))
    last = drive(engine)[-1]
    assert last.finish_reason == "error"
    assert "attention of plugin reference" in last.error and "host bug" in last.error


def test_out_of_memory_stays_recognisable():
    def attention(query, cache, metadata, scale, sliding_window, soft_cap):
        raise torch.OutOfMemoryError("full")

    table = start(with_host_hook("attention", attention))[1]
    with pytest.raises(KernelError, match="out of memory") as caught:
        table.attention(*[torch.zeros(1)] * 6)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_table_keeps_nothing_of_pluggy():
    """From the table no path over attributes, closures and containers leads to pluggy; module globals do not count."""
    backend = sim_backend(("attention", "sample"))
    table = bind(plan_for(backend), backend, FallbackCounters())
    seen, queue = set(), [table]
    while queue:
        item = queue.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        assert not type(item).__module__.startswith("pluggy"), item
        queue += reachable(item)
    assert len(seen) > 50
    assert "pluggy" in sys.modules  # the walk would have met it


def reachable(item):
    if isinstance(item, (str, bytes, int, float, torch.Tensor, torch.dtype, type, type(sys))):
        return []
    found = []
    if isinstance(item, dict) or hasattr(item, "items"):
        found += [*item.keys(), *item.values()]
    elif isinstance(item, (list, tuple, set)):
        found += list(item)
    found += [cell.cell_contents for cell in getattr(item, "__closure__", None) or ()]
    found += list(getattr(item, "__dict__", {}).values())
    found += [getattr(item, name) for name in getattr(type(item), "__slots__", ()) if hasattr(item, name)]
    found += [value for value in (getattr(item, "__self__", None), getattr(item, "__wrapped__", None)) if value]
    return found


def test_a_priced_only_plan_is_not_bound():
    backend = sim_backend(("attention",))
    with pytest.raises(PluginError, match="can be priced but not run"):
        bind(plan_for(backend, keep=("KV",)), backend, FallbackCounters())


def test_a_backend_from_a_module_needs_no_entry_point():
    import qiao_reference

    assert backend_of(qiao_reference, "reference").device.torch_device == "cpu"
