"""The plan as data and as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qiao.registry.placement import Kind
from qiao.registry.policy import format_bytes, refusal
from qiao.registry.pricing import Price, Rates, weight_bytes

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
        "kv": {
            "place": plan.placement("allocate_kv").place,
            "layout": plan.kv_layout,
            "block_size": plan.block_size,
            "dtype": plan.shape.cache_dtype,
        },
        "policy": {"fallback": str(plan.policy), "budget_bytes": plan.policy.budget},
        "refused": refusal(plan, plan.policy) or None,
        "kept": list(plan.kept),
        "bindable": not plan.kept,
        "weights": weights(plan),
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
    """The plan as plain lines: one for each operator that a step calls, then sums and remarks."""
    price = plan.price()
    lines = [
        f"plan for {plan.shape.architecture} ({plan.shape.dtype}) on {plan.device}, {plan.step_text}",
        _line("operator", "group", "runs on", "calls", "to host", "to device", "ms"),
    ]
    lines += [_amounts(row.operator, row.group, row.place, row.price, plan.rates) for row in price.rows if shown(row)]
    for name, part in (("inputs", price.inputs), ("outputs", price.outputs), ("total", price.total)):
        lines.append(_amounts(name, "", "", part, plan.rates))
    return "\n".join(lines + remarks(plan))


def shown(row: PlanRow) -> bool:
    """Whether a row says something to a reader: a step calls it, or it is why a group moved."""
    return bool(row.price.calls) or row.gap


def remarks(plan: Plan) -> list[str]:
    """What the numbers alone do not say: reasons, capture, assumptions."""
    rates = plan.rates
    notes = [f"{row.operator} ({row.group}) runs on {row.place}: {row.reason}" for row in plan.fallback_rows if row.gap]
    notes += [
        f"{p.operator} {'runs as plain ' + p.place if p.place else 'is not used'}: {p.reason}"
        for p in plan.placements
        if p.kind in (Kind.COMPOSITE, Kind.UNUSED) and p.operator in (*plan.drop, *plan.failed)
    ]
    used = {"layers": "decode steps are recorded and replayed", "sampling": "possible, but it runs as it is"}
    notes += [f"capture of {region.name}: {region.reason or used[region.name]}" for region in plan.regions]
    owner = plan.placement("allocate_kv").place
    kept = f"{plan.shape.cache_dtype}, layout {plan.kv_layout}, blocks of {plan.block_size} tokens"
    notes.append(f"KV cache: on {owner}, {kept}")
    notes.append(_weights_note(plan))
    if plan.kept:
        notes.append(f"{', '.join(plan.kept)} kept on the device: priced only, cannot be run")
    if any(row.price.estimate for row in plan.fallback_rows):
        notes.append(
            "'<=' marks upper bounds: which experts are used, and how far a kept weight packs, shows at run time"
        )
    notes.append(
        f"times assume {rates.bytes_per_second / 1e9:g} GB/s and {rates.sync_seconds * 1e6:g} us a wait; "
        "what the host computes comes on top"
    )
    refused = refusal(plan, plan.policy)
    if refused:
        notes.append(f"REFUSED: {refused}")
    return notes


def weights(plan: Plan) -> list[dict[str, Any]]:
    """For each scheme, where the weights of linear layers lie and how many bytes they take."""
    found = []
    for scheme in plan.shape.schemes:
        lines = [line for line in plan.shape.linears if line.scheme == scheme]
        size = sum(weight_bytes(line, plan.shape) for line in lines)
        groups = sorted({line.group_size for line in lines} - {-1}) if scheme != "dense" else []
        place = plan.placement("pack_weight", scheme).place
        found.append({"scheme": scheme, "groups": groups, "place": place, "bytes": size})
    return found


def _weights_note(plan: Plan) -> str:
    parts = []
    for item in weights(plan):
        groups = f" in groups of {', '.join(map(str, item['groups']))}" if item["groups"] else ""
        parts.append(f"{format_bytes(item['bytes'])} {item['scheme']}{groups} on {item['place']}")
    return f"linear weights: {', '.join(parts)}"


def _amounts(operator: str, group: str, place: str, price: Price, rates: Rates) -> str:
    return _line(operator, group, place, *amounts(price, rates))


def amounts(price: Price, rates: Rates) -> tuple[str, str, str, str]:
    """Calls, bytes to the host, bytes to the device and milliseconds as text; a dash for nothing."""
    seconds = rates.seconds(price)
    return (
        f"{'<= ' if price.estimate else ''}{price.calls or '-'}",
        format_bytes(price.bytes_to_host) if price.bytes_to_host else "-",
        format_bytes(price.bytes_to_device) if price.bytes_to_device else "-",
        f"{1000 * seconds:.2f}" if seconds else "-",
    )


def _line(*cells: str) -> str:
    widths = (18, 10, 10, 8, 10, 10, 9)
    padded = (c.rjust(w) if i > 2 else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
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
