"""Linear layers: packed once at load in the plugin's own form, multiplied many times."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from qiao.contract import PackedWeight, WeightInfo
from qiao.layers.weights import Target, floating
from qiao.optable import OpTable


class Linear:
    """``x`` [T, I] to [T, O] with a weight, and a bias where ``bias``, on the device of ``ops.matmul[scheme]``.

    ``parts`` maps names of checkpoint tensors (without ``.weight``) to their rows of O. Several parts make one fused
    weight, stacked in order: they wait until all are there, are packed together and let go, so that a load holds both
    forms of one weight at most. The stacked tensor itself is taken too, under ``name``.
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
        scheme: str = "dense",
    ) -> None:
        self._ops = ops.matmul[scheme]
        self._multiply = self._ops.matmul
        self._scheme, self._dtype = scheme, dtype
        self.name, self.in_features, self.out_features = name, in_features, sum(parts.values())
        self._parts, self._has_bias = dict(parts), bias
        self._staged: dict[str, dict[str, torch.Tensor]] = {"weight": {}, "bias": {}}
        self._weight: PackedWeight | None = None
        self._bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, I] in the model's dtype; returns [T, O]."""
        assert self._weight is not None, f"{self.name} is not loaded"
        return self._multiply(x, self._weight, self._bias)

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
            f"{part}.{kind}": Target(shape, partial(self._put, part, kind), tuple(f"{p}.{kind}" for p in covers))
            for kind, shape in shapes.items()
        }

    def _put(self, part: str, kind: str, tensor: torch.Tensor) -> None:
        if part == self.name:
            self._finish(kind, tensor)
            return
        staged = self._staged[kind]
        staged[part] = floating(f"{part}.{kind}", tensor, self._dtype)
        if len(staged) == len(self._parts):
            whole = torch.cat([staged[p] for p in self._parts])
            staged.clear()
            self._finish(kind, whole)

    def _finish(self, kind: str, tensor: torch.Tensor) -> None:
        tensor = floating(f"{self.name}.{kind}", tensor, self._dtype)
        if kind == "bias":
            self._bias = tensor.to(self._ops.device)
            return
        info = WeightInfo(self.name, self.in_features, self.out_features)
        self._weight = self._ops.pack_weight(self._scheme, {"weight": tensor}, info, self._ops.device)


def single(
    ops: OpTable,
    dtype: torch.dtype,
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    scheme: str = "dense",
) -> Linear:
    """A ``Linear`` of one checkpoint tensor."""
    return Linear(ops, dtype, name, in_features, {name: out_features}, bias=bias, scheme=scheme)
