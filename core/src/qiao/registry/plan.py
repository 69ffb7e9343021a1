"""The plan: which operator runs where, why, and what that costs in a step. Data, made before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qiao.contract import CATALOG, Capabilities, ModelShape, StepShape
from qiao.devices import HOST
from qiao.errors import ParameterError
from qiao.registry import report
from qiao.registry.backend import Backend, torch_type
from qiao.registry.placement import Kind, Placement, Request, check_drop, check_names, names_group, place_operators
from qiao.registry.policy import Policy
from qiao.registry.pricing import (
    Price,
    Rates,
    calls_only,
    fallback_price,
    inputs_price,
    kept_state_price,
    operator_sites,
    outputs_price,
)

DEFAULT_BLOCK_SIZE = 16

DEFAULT_STEP = StepShape(tokens=32, seqs=32, logits=32, context=2048, table_width=2048 // DEFAULT_BLOCK_SIZE)
"""What a plan is priced for unless told otherwise: decoding 32 sequences of 2,048 tokens."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One operator of the plan with its price in the plan's step. See ``Placement`` for the other fields."""

    operator: str
    group: str
    kind: Kind
    place: str
    reason: str
    scheme: str
    gap: bool
    price: Price


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a step that the device can record and replay as far as the plan can tell, or why it cannot.

    The engine records decode steps of ``layers``; the device may still refuse what it finds there.
    """

    name: str
    capturable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class StepPrice:
    """One step's price: by operator, the batch that goes down and the tokens that come up, and the sums.

    ``fallback`` is the sum over operators on the host alone; ``total`` is everything that crosses.
    """

    rows: tuple[PlanRow, ...]
    inputs: Price
    outputs: Price

    @property
    def fallback(self) -> Price:
        """What operators on the host move."""
        return sum((row.price for row in self.rows if row.kind is Kind.HOST), Price())

    @property
    def total(self) -> Price:
        """Everything that crosses between host and device in the step, both directions."""
        return self.fallback + self.inputs + self.outputs


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module. ``kv_layout`` and ``block_size`` are what the cache will have; sizes count tokens.

    ``kept`` names groups priced with their state on the device although an operator of theirs runs on the host; such a
    plan cannot be bound. ``device``, ``plugin`` and ``host`` are names; ``torch_device`` is torch's. ``drop`` and
    ``failed`` are hooks left out by the user and by the start-up probe.
    """

    shape: ModelShape
    plugin: str
    device: str
    torch_device: str
    host: str
    placements: tuple[Placement, ...]
    regions: tuple[Region, ...]
    block_size: int
    kv_layout: str
    policy: Policy
    step: StepShape
    rates: Rates
    drop: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    def price(self, step: StepShape | None = None) -> StepPrice:
        """What one step costs; ``step`` defaults to the plan's own. Exact but for rows marked ``estimate``."""
        step = step or self.step
        rows = tuple(self._priced(placement, step) for placement in self.placements)
        away = not self.on_host_device
        return StepPrice(
            rows,
            inputs_price(self.shape, step, device=away, kv=away and not self.moved("KV"), sample=self._samples_away),
            outputs_price(self.shape, step, sample=self._samples_away, counts=away and self._visits_experts),
        )

    @property
    def on_host_device(self) -> bool:
        """Whether the device is the host itself, so that nothing is copied and nothing falls back."""
        return torch_type(self.torch_device) == HOST

    @property
    def fallback_rows(self) -> tuple[PlanRow, ...]:
        """The operators that run on the host although the device is another, priced for the plan's step."""
        return tuple(row for row in self.price().rows if row.kind is Kind.HOST)

    @property
    def failed_rows(self) -> tuple[PlanRow, ...]:
        """The operators whose hook raised in the start-up probe and that are replaced on the device."""
        return tuple(r for r in self.price().rows if r.operator in self.failed and r.kind is not Kind.HOST)

    @property
    def step_text(self) -> str:
        """The plan's step in words."""
        what = "decoding" if self.step.tokens == self.step.seqs else f"{self.step.tokens} new tokens of"
        return f"{what} {self.step.seqs} sequences at {self.step.context} tokens of context"

    def moved(self, group: str) -> bool:
        """Whether the state of ``group`` (``KV``, ``W[dense]``, ``S``) lies with a host plugin."""
        if any(names_group(name, group) for name in self.kept):
            return False
        return any(p.kind is Kind.HOST for p in self.placements if p.group == group)

    def placement(self, operator: str, scheme: str = "") -> Placement:
        """The placement of ``operator``; matmul operators have one for each scheme."""
        return next(p for p in self.placements if p.operator == operator and p.scheme == scheme)

    def as_dict(self) -> dict[str, Any]:
        """The plan as data for JSON; the same plan gives the same data."""
        return report.as_dict(self)

    def render(self) -> str:
        """The plan as lines of text."""
        return report.render(self)

    @property
    def _visits_experts(self) -> bool:
        """Whether some experts have no ``expert_matmul``, so that a step reads how many tokens each has got."""
        schemes = {line.scheme for line in self.shape.linears if line.rows == "X"}
        return any(self.placement("expert_matmul", scheme).kind is Kind.UNUSED for scheme in schemes)

    @property
    def _samples_away(self) -> bool:
        return not self.on_host_device and not self.moved("S")

    def _priced(self, placement: Placement, step: StepShape) -> PlanRow:
        return PlanRow(
            placement.operator,
            placement.group,
            placement.kind,
            placement.place,
            placement.reason,
            placement.scheme,
            placement.gap,
            self._price_of(placement, step),
        )

    def _price_of(self, placement: Placement, step: StepShape) -> Price:
        spec = CATALOG[placement.operator]
        if placement.kind is Kind.UNUSED or self._replaced(placement.operator, step):
            return Price()
        sites = operator_sites(spec, placement.scheme, self._seen_by(placement), step)
        if placement.kind is not Kind.HOST or self.on_host_device:
            return calls_only(sites)
        price = fallback_price(spec, sites, self.shape.dtype)
        if any(names_group(name, placement.group) for name in self.kept):
            price += kept_state_price(spec, placement.scheme, self.shape, step)
        return price

    def _seen_by(self, placement: Placement) -> ModelShape:
        """The shape with the linear layers of the operator: ``expert_matmul``, where it is there, has experts'."""
        if placement.operator not in ("matmul", "expert_matmul"):
            return self.shape
        together = self.placement("expert_matmul", placement.scheme).kind is not Kind.UNUSED
        ours = placement.operator == "expert_matmul"
        lines = (x for x in self.shape.linears if (together and x.rows == "X") == ours)
        if ours:  # one call a layer for all of its experts
            lines = (replace(x, count=min(x.count, self.shape.num_layers)) for x in lines)
        return replace(self.shape, linears=tuple(lines))

    def _replaced(self, operator: str, step: StepShape) -> bool:
        """Whether a step leaves ``operator`` out in favour of a more special one."""
        decode_only = step.tokens == step.seqs
        if operator == "decode_attention":
            return not decode_only
        if operator == "attention":
            return decode_only and self.placement("decode_attention").kind is not Kind.UNUSED
        if operator in ("write_kv", "rotary"):
            return self.placement("rope_write_kv").kind is not Kind.UNUSED
        return False


def make_plan(
    shape: ModelShape,
    backend: Backend,
    policy: Policy,
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    block_size: int | None = None,
    step: StepShape = DEFAULT_STEP,
    rates: Rates | None = None,
    failed: Mapping[str, str] | None = None,
) -> Plan:
    """Place every operator of ``shape`` on ``backend`` or its host.

    ``drop`` names hooks or groups of the plugin to leave unused; ``keep`` groups whose state is priced as staying on
    the device; ``block_size`` None takes what the device allows nearest to 16; ``failed`` maps operators to what the
    start-up probe said. Raises ``ParameterError`` for unknown names, ``PluginError`` where an operator can run nowhere.
    """
    drop = check_drop(drop)
    keep = check_names(keep, "keep", operators=False)
    if "S" in keep:
        raise ParameterError("keep", "S holds no state that could stay on the device")
    failed = dict(failed or {})
    size = block_size or allowed_block_size(DEFAULT_BLOCK_SIZE, backend.capabilities)
    placements = tuple(place_operators(shape, backend, Request(size, tuple(drop), tuple(keep), failed)))
    plan = Plan(
        shape=shape,
        plugin=backend.plugin,
        device=backend.device.name,
        torch_device=backend.device.torch_device,
        host=backend.host.plugin,
        placements=placements,
        regions=_regions(placements, backend),
        block_size=size,
        kv_layout="",
        policy=policy,
        step=step,
        rates=rates or Rates(),
        drop=tuple(drop),
        kept=_effective(keep, placements),
        failed=failed,
    )
    owner = backend.named(plan.placement("allocate_kv").place)
    return replace(plan, kv_layout=owner.capabilities.kv_layouts[0])


def allowed_block_size(wanted: int, capabilities: Capabilities) -> int:
    """The block size nearest to ``wanted`` tokens that a chip allows, the smaller of two equally near."""
    if not capabilities.block_sizes:
        return wanted
    return min(capabilities.block_sizes, key=lambda size: (abs(size - wanted), size))


def _effective(keep: Sequence[str], placements: tuple[Placement, ...]) -> tuple[str, ...]:
    moved = {p.group for p in placements if p.kind is Kind.HOST}
    return tuple(name for name in keep if any(names_group(name, group) for group in moved))


def _regions(placements: tuple[Placement, ...], backend: Backend) -> tuple[Region, ...]:
    captures = next((p for p in placements if p.operator == "capture"), None)
    no_hook = "" if captures and captures.kind is Kind.DEVICE else f"{backend.plugin} offers no capture"
    if captures and captures.kind is not Kind.DEVICE and captures.reason:
        no_hook = f"no capture: {captures.reason}"
    regions = []
    for name, groups in (("layers", ("KV", "W")), ("sampling", ("S",))):
        on_host = [
            p.operator
            for p in placements
            if p.kind is Kind.HOST and CATALOG[p.operator].per != "start" and p.group.partition("[")[0] in groups
        ]
        host_reason = f"not captured: {', '.join(dict.fromkeys(on_host))} on the host" if on_host else ""
        reason = host_reason or no_hook
        regions.append(Region(name, not reason, reason))
    return tuple(regions)
