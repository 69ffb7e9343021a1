"""What a placement costs in one step, derived from the catalog's operands; nothing is written down per operator.

Copies and bytes are exact for a given ``StepShape`` except where a price says ``estimate``: which experts a token is
routed to, and which LoRA adapter it has, is known only at run time, so their price is the upper bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import torch

from qiao.contract import CATALOG, LinearShape, ModelShape, Operand, OpSpec, StepShape
from qiao.contract.catalog import ACTIVATION

_TERM = re.compile(r"(\d*)([A-Z]\d?)(?:/(\d+))?")

_SCHEME_BITS = {"w8a16": (8, 16), "w8a8": (8, 16), "fp8": (8, 32), "w4a16": (4, 32)}
"""Bits of a code, and of what a group has beside: a 16-bit scale and, with four bits, a zero of as many."""


@dataclass(frozen=True, slots=True)
class Price:
    """Calls, copies, bytes and host waits of one step. ``estimate`` marks an upper bound."""

    calls: int = 0
    copies_to_host: int = 0
    copies_to_device: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    syncs: int = 0
    estimate: bool = False

    def __add__(self, other: Price) -> Price:
        numbers = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "estimate"}
        return Price(**numbers, estimate=self.estimate or other.estimate)

    @property
    def copies(self) -> int:
        """Copies in both directions."""
        return self.copies_to_host + self.copies_to_device

    @property
    def bytes(self) -> int:
        """Bytes in both directions."""
        return self.bytes_to_host + self.bytes_to_device


@dataclass(frozen=True, slots=True)
class Rates:
    """Stated assumptions of the time estimate: bytes a second over the bus, seconds for one host wait."""

    bytes_per_second: float = 25e9
    sync_seconds: float = 15e-6

    def seconds(self, price: Price) -> float:
        """Copy and waiting time of ``price``; what the host computes comes on top."""
        return price.bytes / self.bytes_per_second + price.syncs * self.sync_seconds


@dataclass(frozen=True, slots=True)
class Site:
    """Where a step calls an operator: ``calls`` calls that move ``repeats`` times the operands sized by ``letters``.

    The two numbers differ only where rows are spread over calls in a way that is known at run time (experts).
    """

    calls: int
    repeats: int
    letters: Mapping[str, int]
    estimate: bool = False


_DEVICE_INPUTS = (
    Operand("token_ids", "move", "T", "int64"),
    Operand("positions", "move", "T", "int64"),
    Operand("logits_rows", "move", "N", "int64"),
)
_KV_INPUTS = (
    Operand("query_start", "move", "B1", "int32"),
    Operand("seq_lens", "move", "B", "int32"),
    Operand("block_tables", "move", "B P", "int32"),
    Operand("slot_mapping", "move", "T", "int64"),
)
_SAMPLE_INPUTS = (
    *(Operand(name, "move", "N", "float32") for name in ("temperature", "top_p", "min_p", "uniform")),
    Operand("top_k", "move", "N", "int32"),
)
_OUTPUTS = (Operand("token_ids", "move", "N", "int64"),)


def element_size(dtype: str) -> int:
    """Bytes of one element of a torch dtype by name."""
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return int(found.itemsize)


def operand_bytes(operand: Operand, letters: Mapping[str, int], activation: str) -> int:
    """Bytes of one operand; ``letters`` gives a size for each letter of its symbolic shape."""
    size = element_size(activation if operand.dtype == ACTIVATION else operand.dtype)
    for term in operand.shape.split():
        match = _TERM.fullmatch(term)
        assert match is not None, f"catalog shape {operand.shape!r}"
        size *= int(match[1] or 1) * letters[match[2]] // int(match[3] or 1)
    return size


def operator_sites(spec: OpSpec, scheme: str, shape: ModelShape, step: StepShape) -> list[Site]:
    """Where one step of ``shape`` calls ``spec``; for the matmul family only the layers of ``scheme``."""
    per = CATALOG[spec.replaces].per if spec.replaces in CATALOG else spec.per
    common = {"T": step.tokens, "N": step.logits, "B": step.seqs, "V": shape.vocab_size, "E": shape.hidden_size}
    if per == "attention":
        return [
            Site(a.count, a.count, {**common, "H": a.num_heads, "K": a.num_kv_heads, "D": a.head_dim})
            for a in shape.attention
        ]
    if per == "linear":
        return [_linear_site(line, shape, step, common) for line in shape.linears if line.scheme == scheme]
    if per == "step":
        calls = 1 if step.logits else 0
        return [Site(calls, calls, common)]
    calls = dict(shape.fused_calls).get(spec.name, 0) if per == "light" else 0
    return [Site(calls, 0, common)] if calls else []


def _linear_site(line: LinearShape, shape: ModelShape, step: StepShape, common: Mapping[str, int]) -> Site:
    letters = {**common, "I": line.in_features, "O": line.out_features}
    if line.rows == "X":
        rows = step.tokens * max(1, shape.experts_per_token) * shape.num_layers
        return Site(min(line.count, rows), 1, {**letters, "T": rows}, estimate=True)
    if line.rows == "L":
        return Site(line.count * min(shape.max_loras, step.seqs), line.count, letters, estimate=True)
    rows = step.logits if line.rows == "N" else step.tokens
    count = line.count if rows else 0
    return Site(count, count, {**letters, "T": rows})


def calls_only(sites: Iterable[Site]) -> Price:
    """The price of an operator that runs where its operands are."""
    listed = list(sites)
    return Price(calls=sum(site.calls for site in listed), estimate=any(site.estimate for site in listed))


def fallback_price(spec: OpSpec, sites: Iterable[Site], activation: str) -> Price:
    """The price of ``spec`` on the host while its ``move`` operands lie on the device."""
    total = Price()
    down = [operand for operand in spec.args if operand.place == "move"]
    back = [operand for operand in spec.results if operand.place == "move"]
    for site in sites:
        total += Price(
            calls=site.calls,
            copies_to_host=site.calls * len(down),
            copies_to_device=site.calls * len(back),
            bytes_to_host=site.repeats * sum(operand_bytes(o, site.letters, activation) for o in down),
            bytes_to_device=site.repeats * sum(operand_bytes(o, site.letters, activation) for o in back),
            syncs=site.calls * (bool(down) + bool(back)),
            estimate=site.estimate,
        )
    return total


def kept_state_price(spec: OpSpec, scheme: str, shape: ModelShape, step: StepShape) -> Price:
    """What the state of ``spec`` moves each step if it stays on the device while the operator runs on the host.

    The cache: all that the step reads of it goes to the host, or what it writes comes back. A weight: all of it.
    """
    names = {operand.name for operand in spec.args if operand.place == "state"}
    total = Price()
    for a in shape.attention if "cache" in names else ():
        vector = a.head_dim * element_size(shape.cache_dtype) + shape.kv_scale_bytes
        width = 2 * a.count * a.num_kv_heads * vector
        if "cache" in spec.mutates:
            total += Price(copies_to_device=2 * a.count, bytes_to_device=step.tokens * width, syncs=a.count)
        else:
            read = min(step.context, a.sliding_window) if a.sliding_window else step.context
            total += Price(copies_to_host=2 * a.count, bytes_to_host=step.seqs * read * width)
    for line in shape.linears if "weight" in names else ():
        if line.scheme == scheme:
            moved = weight_bytes(line, shape)
            total += Price(copies_to_host=line.count, bytes_to_host=moved, estimate=scheme != "dense")
    return total


def weight_bytes(line: LinearShape, shape: ModelShape) -> int:
    """Bytes of all weights of ``line``: exact for dense ones, else what a plain packing takes.

    Of adapters those of ``shape.max_loras``.
    """
    values = line.count * line.in_features * line.out_features * (shape.max_loras if line.rows == "L" else 1)
    if line.scheme not in _SCHEME_BITS:
        return values * element_size(shape.dtype)
    bits, beside = _SCHEME_BITS[line.scheme]
    groups = -(-line.in_features // line.group_size) if line.group_size > 0 else 1
    return (values * bits + line.count * line.out_features * groups * beside) // 8


def inputs_price(shape: ModelShape, step: StepShape, device: bool, kv: bool, sample: bool) -> Price:
    """The batch that the host builds for each step; the flags say which of the three places lie on the device."""
    operands = (_DEVICE_INPUTS if device else ()) + (_KV_INPUTS if kv else ())
    if sample and step.logits:
        operands += _SAMPLE_INPUTS
    if not step.logits:
        operands = tuple(o for o in operands if "N" not in o.shape)
    letters = _batch_letters(step)
    moved = sum(operand_bytes(o, letters, shape.dtype) for o in operands)
    return Price(copies_to_device=len(operands), bytes_to_device=moved)


def outputs_price(shape: ModelShape, step: StepShape, sample: bool, counts: bool) -> Price:
    """What the host reads in each step: the sampled tokens and, in a mixture of experts, each expert's token counts.

    ``sample`` and ``counts`` say whether tokens are drawn on the device, and whether experts are visited there one by
    one. The counts are an upper bound, as not every layer need have experts.
    """
    price = Price()
    if sample and step.logits:
        moved = sum(operand_bytes(o, _batch_letters(step), shape.dtype) for o in _OUTPUTS)
        price += Price(copies_to_host=len(_OUTPUTS), bytes_to_host=moved, syncs=1)
    experts = max((line.count for line in shape.linears if line.rows == "X"), default=0)
    if counts and experts:
        moved = experts * element_size("int64")
        layers = shape.num_layers
        price += Price(copies_to_host=layers, bytes_to_host=moved, syncs=layers, estimate=True)
    return price


def _batch_letters(step: StepShape) -> dict[str, int]:
    return {"T": step.tokens, "N": step.logits, "B": step.seqs, "B1": step.seqs + 1, "P": step.table_width}
