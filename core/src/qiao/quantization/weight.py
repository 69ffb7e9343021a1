"""Quantized weights in the contract's forms (``qiao.contract.matmul``), and what can be done to them exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType

import torch

_WEIGHT_ONLY = ("w4a16", "w8a16")
"""From narrow to wide: a weight of the first can be written in the second without a change of value."""

_OF_INPUTS = ("perm", "input_scale")
"""What belongs to the inputs of a weight: weights that differ in it cannot be one."""

_ROWS_AT_ONCE = 1 << 22
"""Most elements that are dequantized at once beside the result (16 MiB of float32)."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How a linear weight is stored: a scheme of the contract, and inputs that share a scale (-1: all of a row)."""

    scheme: str = "dense"
    group_size: int = -1


DENSE = WeightForm()


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [O, I] of ``form``; ``tensors`` are named and shaped as ``pack_weight`` takes them.

    On the meta device it stands for a weight that is not read yet.
    """

    form: WeightForm
    tensors: Mapping[str, torch.Tensor]

    @property
    def shape(self) -> torch.Size:
        """[O, I]."""
        return self.tensors["weight"].shape

    def to(self, device: str) -> QuantizedWeight:
        """The same on ``device``."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})

    def dequantize(self) -> torch.Tensor:
        """The values [O, I] as float32: ``(weight - zero) * scale``, columns in the model's order."""
        rows, columns = self.shape
        values = torch.empty(rows, columns, device=self.tensors["weight"].device)
        if values.is_meta:
            return values
        step = max(1, _ROWS_AT_ONCE // max(1, columns))
        for first in range(0, rows, step):
            part = slice(first, first + step)
            block = self.tensors["weight"][part].float()
            if "zero" in self.tensors:
                block -= self._spread("zero", part)
            values[part] = block * self._spread("scale", part)
        perm = self.tensors.get("perm")
        return values if perm is None else values.index_select(1, torch.argsort(perm))

    def _spread(self, name: str, part: slice) -> torch.Tensor:
        numbers = self.tensors[name]
        numbers = (numbers if numbers.shape[0] == 1 else numbers[part]).float()
        if numbers.shape[1] == 1:
            return numbers
        return numbers.repeat_interleave(self.form.group_size, dim=1)[:, : self.shape[1]]


Weight = torch.Tensor | QuantizedWeight
"""What a checkpoint holds under a name."""


def take_rows(weight: Weight, order: torch.Tensor) -> Weight:
    """The rows of ``weight`` in ``order`` [rows] int64."""
    if isinstance(weight, torch.Tensor):
        return weight[order]
    rows = weight.shape[0]
    return replace(
        weight,
        tensors={n: x[order] if n not in _OF_INPUTS and x.shape[0] == rows else x for n, x in weight.tensors.items()},
    )


def common_form(forms: Sequence[WeightForm]) -> WeightForm:
    """The form in which weights of ``forms`` can be one: the widest, with the finest groups; dense where there is none.

    Dense is the answer too where one of them is dense, since nothing else can hold it.
    """
    schemes = {form.scheme for form in forms}
    groups = [form.group_size for form in forms if form.group_size > 0]
    group = reduce(math.gcd, groups) if groups else -1
    if len(schemes) == 1:
        return WeightForm(forms[0].scheme, group)
    return WeightForm(_WEIGHT_ONLY[-1], group) if schemes <= set(_WEIGHT_ONLY) else DENSE


Forms = Mapping[str, WeightForm]
"""Names of a model's linear weights (without ``.weight``) to how they are stored; dense where it has none."""

NO_FORMS: Forms = MappingProxyType({})


def form_of(forms: Forms, name: str, parts: Sequence[str]) -> WeightForm:
    """How the weight ``name`` will be kept, which comes whole or in ``parts``."""
    if name in forms or not parts:
        return forms.get(name, DENSE)
    return common_form([forms.get(part, DENSE) for part in parts])


def stack(parts: Sequence[QuantizedWeight], scheme: str) -> list[QuantizedWeight]:
    """``parts`` as one weight of ``scheme``, rows in order and values unchanged; as several where columns differ.

    The second happens with GPTQ's act-order, where each part may bring a permutation of its own, and with static scales
    of inputs that differ. ``scheme`` is that of ``common_form``, or a wider one.
    """
    form = replace(common_form([part.form for part in parts]), scheme=scheme)
    written = [_written(part, form) for part in parts]
    first = parts[0].tensors
    if not all(_same(part.tensors.get(name), first.get(name)) for part in parts for name in _OF_INPUTS):
        return written
    if len(written) == 1:
        return written
    names = {name: None for part in written for name in part.tensors if name not in _OF_INPUTS}
    tensors = {name: concatenated([_filled(part, name) for part in written]) for name in names}
    return [QuantizedWeight(form, tensors | {name: first[name] for name in _OF_INPUTS if name in first})]


def concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.cat`` by rows. Of outlines (on the meta device) only the shape, as torch loads its compiler for those."""
    if not parts[0].is_meta:
        return torch.cat(list(parts))
    rows = sum(part.shape[0] for part in parts)
    return torch.empty(rows, *parts[0].shape[1:], dtype=parts[0].dtype, device="meta")


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _written(part: QuantizedWeight, form: WeightForm) -> QuantizedWeight:
    """``part`` in a wider scheme and finer groups. An outline stays as it is: only its rows count."""
    tensors = dict(part.tensors)
    if tensors["weight"].is_meta:
        return QuantizedWeight(form, tensors)
    if part.form.scheme != form.scheme:
        tensors["weight"] = tensors["weight"].to(torch.int8)
    if part.form.group_size != form.group_size:
        old = part.form.group_size if part.form.group_size > 0 else part.shape[1]
        groups = -(-part.shape[1] // form.group_size)
        start = torch.arange(groups) * form.group_size
        for name in ("scale", "zero"):
            if name in tensors:
                tensors[name] = tensors[name].index_select(1, start // old)
    return QuantizedWeight(form, tensors)


def _filled(part: QuantizedWeight, name: str) -> torch.Tensor:
    """One tensor of a part, with a row of numbers for each output; a missing zero is 0."""
    if part.tensors["weight"].is_meta:
        return part.tensors["weight"]
    if name == "zero" and "zero" not in part.tensors:
        return torch.zeros_like(_filled(part, "scale"))
    tensor = part.tensors[name]
    return tensor if name == "weight" else tensor.expand(part.shape[0], -1)
