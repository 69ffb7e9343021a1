"""From a plan to the frozen table of plain functions; pluggy is not reachable from what this returns."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from qiao.contract import CATALOG, composites
from qiao.devices import HOST
from qiao.errors import PluginError
from qiao.optable import MatmulOps, OpTable
from qiao.registry.backend import Backend
from qiao.registry.fallback import FallbackCounters, on_host, staged
from qiao.registry.manager import Function
from qiao.registry.placement import Kind, Placement
from qiao.registry.plan import Plan

_AT_START = ("allocate_kv", "pack_weight")
"""Called while starting, on state only; bound as they are and not counted."""


def bind(plan: Plan, backend: Backend, counters: FallbackCounters) -> OpTable:
    """The table that models and engine call, one function for each operator of ``plan``.

    Operators on the host are wrapped so that they copy and count into ``counters``; the device's are bound as they are.
    Raises ``PluginError`` for a plan that keeps state away from its operators, which can be priced but not run.
    """
    if plan.kept:
        raise PluginError(
            f"a plan that keeps {', '.join(plan.kept)} on the device can be priced but not run: leave out --keep"
        )
    device = backend.device.torch_device
    bound = {
        (p.operator, p.scheme): _function(p, backend, counters)
        for p in plan.placements
        if CATALOG[p.operator].family != "device" or CATALOG[p.operator].optional
    }
    plain: dict[str, Any] = {operator: function for (operator, scheme), function in bound.items() if not scheme}
    if not all(region.capturable for region in plan.regions if region.name == "layers"):
        plain["capture"] = None
    sample_away = plan.moved("S")
    return OpTable(
        device=device,
        kv_device=HOST if plan.moved("KV") else device,
        sample_device=HOST if sample_away else device,
        kv_layout=plan.kv_layout,
        capture_sizes=backend.capabilities.capture_sizes,
        memory_info=backend.hooks["memory_info"],
        synchronize=backend.hooks["synchronize"],
        stage_logits=staged(counters.record("sample")) if sample_away else _same,
        matmul=MappingProxyType({scheme: _matmul(scheme, plan, bound, device) for scheme in plan.shape.schemes}),
        **plain,
    )


def _same(value: Any) -> Any:
    return value


def _matmul(scheme: str, plan: Plan, bound: dict[tuple[str, str], Function | None], device: str) -> MatmulOps:
    pack, product = bound["pack_weight", scheme], bound["matmul", scheme]
    assert pack is not None and product is not None  # required hooks are never unused
    where = HOST if plan.moved(f"W[{scheme}]") else device
    return MatmulOps(where, pack, product, bound["expert_matmul", scheme])


def _function(placement: Placement, backend: Backend, counters: FallbackCounters) -> Function | None:
    name = placement.operator
    if placement.kind is Kind.UNUSED:
        return None
    if placement.kind is Kind.COMPOSITE:
        composite: Function = getattr(composites, name)
        return composite
    function = backend.named(placement.place).hooks[name]
    if placement.kind is Kind.DEVICE or name in _AT_START:
        return function
    spec = CATALOG[name]
    return on_host(spec, function, placement.place, backend.device.torch_device, counters.record(name))
