"""Linear layers: packed once at load in the plugin's own form, multiplied many times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from qiao.contract import PackedWeight, WeightInfo
from qiao.errors import ModelError
from qiao.layers.lora import AdapterRows, LinearAdapters
from qiao.layers.weights import Target, floating
from qiao.optable import MatmulOps, OpTable
from qiao.quantization import NO_FORMS, Forms, QuantizedWeight, Weight, concatenated, form_of, stack

_BITS = {"dense": 16, "w4a16": 4}


class Linear:
    """``x`` [T, I] to [T, O] with a weight, and a bias where ``bias``, on the device of ``ops.matmul[scheme]``.

    ``parts`` maps names of checkpoint tensors (without ``.weight``) to their rows of O. Several parts make one fused
    weight, stacked in order: they wait until all are there, are packed together and let go, so that a load holds both
    forms of one weight at most. The stacked tensor itself is taken too, under ``name``. ``forms`` says how the parts
    are stored; those that cannot be stacked without a change of value are multiplied one by one.
    """

    def __init__(
        self,
        ops: OpTable,
        dtype: torch.dtype,
        name: str,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        forms: Forms = NO_FORMS,
    ) -> None:
        self._scheme = form_of(forms, name, tuple(parts)).scheme
        self._ops = ops.matmul[self._scheme]
        self._multiply = self._ops.matmul
        self._dtype = dtype
        self.name, self.in_features, self.out_features = name, in_features, sum(parts.values())
        self._parts, self._has_bias = dict(parts), bias
        self._staged: dict[str, dict[str, Weight]] = {"weight": {}, "bias": {}}
        self._weight: PackedWeight | None = None
        self._apart: tuple[PackedWeight, ...] = ()
        self._bias: torch.Tensor | None = None
        self._changes_inputs = False
        self._adapters: LinearAdapters | None = None

    @property
    def parts(self) -> Mapping[str, int]:
        """Rows of O by checkpoint name, in order."""
        return self._parts

    def adapt(self, ops: MatmulOps, rows: AdapterRows) -> LinearAdapters:
        """Let the layer have adapters, on the device of ``ops``, for what ``rows`` says of each step."""
        self._adapters = LinearAdapters(ops, rows, self.name, self.in_features, self.out_features, self._dtype)
        return self._adapters

    @property
    def alone(self) -> PackedWeight | None:
        """The packed weight, where it is all that there is to this layer: no bias, one piece, inputs as they come."""
        return self._weight if self._bias is None and not self._changes_inputs else None

    @property
    def scheme(self) -> str:
        """How the weight is stored."""
        return self._scheme

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, I] in the model's dtype; returns [T, O]."""
        y = self._multiply_apart(x) if self._weight is None else self._multiply(x, self._weight, self._bias)
        return y if self._adapters is None else self._adapters.add(x, y)

    def _multiply_apart(self, x: torch.Tensor) -> torch.Tensor:
        assert self._apart, f"{self.name} is not loaded"
        biases: Sequence[torch.Tensor | None] = [None] * len(self._apart)
        if self._bias is not None:
            biases = self._bias.split([weight.info.out_features for weight in self._apart])
        return torch.cat([self._multiply(x, w, b) for w, b in zip(self._apart, biases, strict=True)], dim=-1)

    def targets(self) -> dict[str, Target]:
        """Checkpoint names to targets: the parts, and the fused name where there are several parts."""
        found: dict[str, Target] = {}
        for part, rows in self._parts.items():
            found.update(self._pair(part, rows, ()))
        if self.name not in self._parts:
            found.update(self._pair(self.name, self.out_features, tuple(self._parts)))
        return found

    def _pair(self, part: str, rows: int, covers: tuple[str, ...]) -> dict[str, Target]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (rows, self.in_features)}
        if self._has_bias:
            shapes["bias"] = (rows,)
        return {
            f"{part}.{kind}": Target(
                shape, partial(self._put, part, kind), tuple(f"{p}.{kind}" for p in covers), packed=kind == "weight"
            )
            for kind, shape in shapes.items()
        }

    def _put(self, part: str, kind: str, weight: Weight) -> None:
        staged = self._staged[kind]
        if kind == "bias" or self._scheme == "dense":
            staged[part] = floating(f"{part}.{kind}", weight, self._dtype)
        else:
            staged[part] = self._quantized(part, weight)
        if part == self.name or len(staged) == len(self._parts):
            whole = [staged[p] for p in self._parts] if part != self.name else [staged[part]]
            staged.clear()
            self._finish(kind, whole)

    def _quantized(self, part: str, weight: Weight) -> QuantizedWeight:
        if isinstance(weight, QuantizedWeight):
            return weight
        raise ModelError(
            f"tensor {part}.weight is {str(weight.dtype).removeprefix('torch.')}, but the checkpoint says that it is "
            f"{self._scheme}; its config and its weights belong to different models"
        )

    def _finish(self, kind: str, parts: list[Weight]) -> None:
        """Join ``parts`` and keep the result in its final form; the list is emptied before packing, to free memory."""
        if kind == "bias":
            self._bias = _joined(parts).to(self._ops.device)
        elif self._scheme == "dense":
            self._weight = self._pack({"weight": _joined(parts)}, -1)
        else:
            stacked = stack([part for part in parts if isinstance(part, QuantizedWeight)], self._scheme)
            parts.clear()
            packed = tuple(self._pack(weight.tensors, weight.form.group_size) for weight in stacked)
            self._weight, self._apart = (packed[0], ()) if len(packed) == 1 else (None, packed)

    def _pack(self, tensors: Mapping[str, torch.Tensor], group_size: int) -> PackedWeight:
        self._changes_inputs = "perm" in tensors or "input_scale" in tensors
        rows, bits = tensors["weight"].shape[0], _BITS.get(self._scheme, 8)
        info = WeightInfo(self.name, self.in_features, rows, bits, group_size, symmetric="zero" not in tensors)
        return self._ops.pack_weight(self._scheme, tensors, info, self._ops.device)


def _joined(parts: list[Weight]) -> torch.Tensor:
    """The plain ``parts`` as one tensor; takes them out of the list."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    parts.clear()
    return tensors[0] if len(tensors) == 1 else concatenated(tensors)


def single(
    ops: OpTable,
    dtype: torch.dtype,
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    forms: Forms = NO_FORMS,
) -> Linear:
    """A ``Linear`` of one checkpoint tensor."""
    return Linear(ops, dtype, name, in_features, {name: out_features}, bias=bias, forms=forms)
