"""AWQ checkpoints as AutoAWQ writes them, in the orders of its ``gemm`` and ``gemv`` kernels.

gemm: ``qweight`` [I, O / 8] int32, of whose words slot i holds output ``GEMM_ORDER[i]``; ``qzeros`` [groups, O / 8]
alike; ``scales`` [groups, O]. gemv: ``qweight`` [O, I / 8] and ``qzeros`` [O, groups / 8] in plain order, ``scales``
[O, groups], the last two padded. Source: ``awq/modules/linear`` of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qiao.errors import ModelError
from qiao.quantization.packing import (
    expect,
    groups_of,
    int32_words,
    integer_form,
    integer_weight,
    number,
    promised,
    scales,
    unpack,
)
from qiao.quantization.weight import QuantizedWeight, WeightForm

_BITS = 4
GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Slot i of a word holds this one of its eight outputs."""


class AWQ:
    """See the module."""

    name = "awq"
    markers = ("qweight",)
    parts = ("qweight", "qzeros", "scales")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        bits = settings.get("bits", settings.get("w_bit", _BITS))
        if bits != _BITS:
            raise ModelError(f"quantization_config: bits is {bits!r}; AWQ is read with {_BITS}")
        self._group = number(settings, "group_size" if "group_size" in settings else "q_group_size", 128)
        self._order = str(settings.get("version", "gemm")).lower()
        if self._order not in ("gemm", "gemv"):
            raise ModelError(f"quantization_config: version {self._order!r} of AWQ is not read; gemm and gemv are")
        self._asymmetric = bool(settings.get("zero_point", False))
        self._left_out = tuple(settings.get("modules_to_not_convert") or ())

    def promise(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> QuantizedWeight:
        """The weight's form and shape from the shapes of its parts."""
        if any(name in module for name in self._left_out):
            raise ModelError(
                f"tensor {module}.qweight is quantized, but quantization_config: modules_to_not_convert leaves it out"
            )
        first, second = shapes["qweight"]
        rows, columns = (second * 8, first) if self._order == "gemm" else (first, second * 8)
        return promised(self.form(module, columns), rows, columns)

    def form(self, module: str, columns: int) -> WeightForm:
        """By the settings alone."""
        return integer_form(_BITS, self._group, columns)

    def weight(self, module: str, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """The weight of ``module`` [O, I]."""
        codes = int32_words(f"{module}.qweight", tensors["qweight"])
        scale = scales(f"{module}.scales", tensors["scales"])
        packed = int32_words(f"{module}.qzeros", tensors["qzeros"]) if "qzeros" in tensors else None
        if packed is None and self._asymmetric:
            raise KeyError("qzeros")
        if self._order == "gemm":
            codes = _outputs(codes)
            groups = groups_of(codes.shape[1], self._group)
            expect(f"{module}.scales", scale.shape, (groups, codes.shape[0]))
            scale = scale.T.contiguous()
            zero = None if packed is None else _outputs(packed)
        else:
            codes = unpack(codes, _BITS)
            groups = groups_of(codes.shape[1], self._group)
            if scale.shape[0] != codes.shape[0] or scale.shape[1] < groups:
                expect(f"{module}.scales", scale.shape, (codes.shape[0], groups))
            scale = scale[:, :groups].contiguous()
            zero = None if packed is None else unpack(packed, _BITS)[:, :groups]
        if zero is None:
            zero = torch.full(scale.shape, 1 << (_BITS - 1), dtype=torch.uint8)
        expect(f"{module}.qzeros", zero.shape, scale.shape)
        return integer_weight(codes, scale, zero, _BITS, self._group)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """[n, O / 8] words in gemm's order as [O, n]."""
    slots = unpack(words.contiguous(), _BITS).view(words.shape[0], -1, len(GEMM_ORDER))
    return slots[..., torch.argsort(torch.tensor(GEMM_ORDER))].flatten(1).T.contiguous()
