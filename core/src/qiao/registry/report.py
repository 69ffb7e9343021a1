"""The plan as data and as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qiao.registry.placement import Kind
from qiao.registry.policy import format_bytes, refusal
from qiao.registry.pricing import Price, Rates

if TYPE_CHECKING:
    from qiao.registry.plan import Plan, PlanRow

SCHEMA = 1
"""Version of the JSON that ``as_dict`` gives; new keys do not raise it."""


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON-ready data: where each operator runs, why, and the price of the plan's step."""
    price = plan.price()
    return {
        "schema": SCHEMA,
        "model": plan.shape.architecture,
        "dtype": plan.shape.dtype,
        "device": plan.device,
        "plugin": plan.plugin,
        "host": plan.host,
        "kv": {"place": plan.placement("allocate_kv").place, "layout": plan.kv_layout, "block_size": plan.block_size},
        "policy": {"fallback": str(plan.policy), "budget_bytes": plan.policy.budget},
        "refused": refusal(plan, plan.policy) or None,
        "kept": list(plan.kept),
        "bindable": not plan.kept,
        "step": asdict(plan.step),
        "assumptions": asdict(plan.rates),
        "operators": [_row(row, plan) for row in price.rows],
        "inputs": _price(price.inputs, plan.rates),
        "outputs": _price(price.outputs, plan.rates),
        "fallback": _price(price.fallback, plan.rates),
        "total": _price(price.total, plan.rates),
        "capture": [asdict(region) for region in plan.regions],
    }


def render(plan: Plan) -> str:
    """The plan as plain lines: one for each operator that a user can act on, then sums and remarks."""
    price = plan.price()
    lines = [
        f"plan for {plan.shape.architecture} ({plan.shape.dtype}) on {plan.device}; host plugin {plan.host}; "
        f"KV blocks of {plan.block_size} tokens, layout {plan.kv_layout}",
        f"priced for {plan.step_text}",
        _line("operator", "group", "runs on", "calls", "to host", "to device", "ms", "reason"),
    ]
    lines += [text_row(row, plan.rates) for row in price.rows if shown(row)]
    for name, part in (("inputs", price.inputs), ("outputs", price.outputs), ("total", price.total)):
        lines.append(_amounts(name, "", "", part, plan.rates, ""))
    lines += remarks(plan)
    return "\n".join(lines)


def shown(row: PlanRow) -> bool:
    """Whether a row says something: it is called in a step, or it is not on the device."""
    return bool(row.price.calls) or row.kind is Kind.HOST


def remarks(plan: Plan) -> list[str]:
    """What the numbers alone do not say."""
    rates = plan.rates
    notes = [
        f"times assume {rates.bytes_per_second / 1e9:g} GB/s and {rates.sync_seconds * 1e6:g} us a wait; "
        "what the host computes comes on top"
    ]
    notes += [f"capture: {region.name}: {region.reason or 'captured'}" for region in plan.regions]
    if plan.kept:
        notes.append(f"{', '.join(plan.kept)} kept on the device: priced only, cannot be run")
    if any(row.price.estimate for row in plan.fallback_rows):
        notes.append("rows of experts are upper bounds: which experts are used is known at run time")
    refused = refusal(plan, plan.policy)
    if refused:
        notes.append(f"REFUSED: {refused}")
    return notes


def text_row(row: PlanRow, rates: Rates) -> str:
    """One operator as a line."""
    return _amounts(row.operator, row.group, row.place, row.price, rates, row.reason)


def _amounts(operator: str, group: str, place: str, price: Price, rates: Rates, reason: str) -> str:
    return _line(
        operator,
        group,
        place,
        str(price.calls or ""),
        format_bytes(price.bytes_to_host),
        format_bytes(price.bytes_to_device),
        f"{1000 * rates.seconds(price):.2f}",
        reason,
    )


def _line(*cells: str) -> str:
    widths = (18, 10, 10, 6, 11, 11, 9, 0)
    right = (3, 4, 5, 6)
    padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
    return "  ".join(padded).rstrip()


def _price(price: Price, rates: Rates) -> dict[str, Any]:
    return {**asdict(price), "bytes": price.bytes, "copies": price.copies, "seconds": round(rates.seconds(price), 9)}


def _row(row: PlanRow, plan: Plan) -> dict[str, Any]:
    return {
        "operator": row.operator,
        "group": row.group,
        "scheme": row.scheme,
        "place": row.place,
        "kind": row.kind.value,
        "reason": row.reason,
        "gap": row.gap,
        "policy": plan.policy.verdict(row.operator, row.group) if row.kind is Kind.HOST else "",
        **_price(row.price, plan.rates),
    }
