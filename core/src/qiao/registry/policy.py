"""What the user allows: ``allow``, ``warn`` or ``deny`` for each operator or group, and a budget in bytes a step.

For weights there is a fourth word, ``dequantize``: those of a scheme that the device lacks become floating point.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qiao.errors import ParameterError, PlanRefusedError
from qiao.registry.placement import check_names, names_group
from qiao.registry.pricing import Price

if TYPE_CHECKING:
    from qiao.registry.plan import Plan, PlanRow

ALLOW, WARN, DENY, DEQUANTIZE = "allow", "warn", "deny", "dequantize"
_VERDICTS = (ALLOW, WARN, DENY, DEQUANTIZE)

log = logging.getLogger(__name__)


def format_bytes(count: int) -> str:
    """``24.1 MB``, 1000 based, as bus and network speeds are."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:,.1f} {unit}"


@dataclass(frozen=True, slots=True)
class Policy:
    """``default`` holds unless ``overrides`` names the operator or group. ``budget`` is in bytes a step, or None."""

    default: str = WARN
    overrides: Mapping[str, str] = field(default_factory=dict)
    budget: int | None = None

    @classmethod
    def parse(cls, text: str, budget: int | None = None) -> Policy:
        """``"warn"``, or with exceptions ``"warn,attention=deny,KV=allow"``.

        Raises ``ParameterError`` for ``fallback`` or ``fallback_budget``.
        """
        default, overrides = WARN, {}
        for i, item in enumerate(part.strip() for part in text.split(",") if part.strip()):
            name, equals, verdict = (piece.strip() for piece in item.partition("="))
            if not equals:
                name, verdict = "", name
            if verdict not in _VERDICTS:
                raise ParameterError("fallback", f"must be allow, warn or deny, got {verdict!r} in {text!r}")
            if verdict == DEQUANTIZE and not name.startswith("W"):
                raise ParameterError(
                    "fallback", f"dequantize is for weights, as in W=dequantize or W[w4a16]=dequantize, got {item!r}"
                )
            if name:
                check_names([name], "fallback", operators=True)
                overrides[name] = verdict
            elif i:
                raise ParameterError("fallback", f"only the first item may stand without a name, got {text!r}")
            else:
                default = verdict
        if budget is not None and budget < 0:
            raise ParameterError("fallback_budget", f"must not be negative, got {budget}")
        return cls(default, overrides, budget)

    def verdict(self, operator: str, group: str) -> str:
        """What holds for ``operator``: its own word, else its group's, else the default."""
        if operator in self.overrides:
            return self.overrides[operator]
        exact = self.overrides.get(group)
        if exact:
            return exact
        return next((v for name, v in self.overrides.items() if names_group(name, group)), self.default)

    def __str__(self) -> str:
        return ",".join([self.default, *(f"{name}={verdict}" for name, verdict in self.overrides.items())])


def enforce(plan: Plan, policy: Policy) -> None:
    """Stop a plan that ``policy`` forbids; log what it only warns of, once for each group.

    Raises ``PlanRefusedError`` naming each forbidden operator with its reason and price, or the budget's excess.
    """
    refused = refusal(plan, policy)
    if refused:
        raise PlanRefusedError(refused)
    told = (WARN, DEQUANTIZE)  # what the probe found came too late to dequantize
    warned = [row for row in plan.fallback_rows if row.gap and policy.verdict(row.operator, row.group) in told]
    for line in _lines(warned, plan):
        log.warning("runs on the host instead of %s: %s", plan.device, line)
    for row in plan.failed_rows:
        log.warning("%s on %s is replaced by %s: %s", row.operator, plan.device, row.place or "nothing", row.reason)


def refusal(plan: Plan, policy: Policy) -> str:
    """The text of the refusal, empty where the plan is within the policy.

    An operator that only moves along is judged by those that caused the move, unless the policy names it.
    """
    denied = [row for row in plan.fallback_rows if _judged(row, policy) == DENY]
    if denied:
        return (
            f"the fallback policy {str(policy)!r} forbids running these operators on the host instead of "
            f"{plan.device}:\n{_listed(denied, plan)}\n"
            f"Accept them with --fallback warn, or run everything on the host with --device {plan.host}."
        )
    total = plan.price().fallback.bytes
    if policy.budget is not None and total > policy.budget:
        return (
            f"the fallback to the host moves {format_bytes(total)} a step, the budget is {format_bytes(policy.budget)} "
            f"({plan.step_text}):\n{_listed([row for row in plan.fallback_rows if row.gap], plan)}\n"
            f"Raise --fallback-budget to at least {total}, or run everything on the host with --device {plan.host}."
        )
    return ""


def to_dequantize(plan: Plan, policy: Policy) -> frozenset[str]:
    """The schemes of weights that ``plan`` puts on the host and that ``policy`` would have as floating point."""
    rows = (row for row in plan.fallback_rows if row.scheme not in ("", "dense"))
    return frozenset(row.scheme for row in rows if policy.verdict(row.operator, row.group) == DEQUANTIZE)


def _judged(row: PlanRow, policy: Policy) -> str:
    return policy.verdict(row.operator, row.group) if row.gap else policy.overrides.get(row.operator, ALLOW)


def _listed(rows: list[PlanRow], plan: Plan) -> str:
    return "\n".join(f"  {line}" for line in _lines(rows, plan))


def _lines(rows: list[PlanRow], plan: Plan) -> list[str]:
    """One line for each group of ``rows``: operators with reasons, what moves along, the price of all together."""
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        named = [row for row in rows if row.group == group]
        members = [row for row in plan.fallback_rows if row.group == group]
        along = [row.operator for row in members if row not in named]
        price = sum((row.price for row in members), Price())
        lines.append(
            f"{group}: {'; '.join(f'{row.operator} ({row.reason})' for row in named)}"
            f"{', with it ' + ', '.join(along) if along else ''}: {price.calls} calls, {format_bytes(price.bytes)} and "
            f"about {1000 * plan.rates.seconds(price):.1f} ms a step"
        )
    return lines
