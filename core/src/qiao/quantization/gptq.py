"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them.

``qweight`` [I * bits / 32, O] int32 holds a column's inputs one after another, ``scales`` [groups, O], ``qzeros``
[groups, O * bits / 32] int32 the zero points, less one in the first format (``checkpoint_format`` ``gptq``) and as they
are in the second (``gptq_v2``); ``g_idx`` [I] is the group of each input (act-order). Source: ``qlinear`` of AutoGPTQ.
"""

from __future__ import annotations

import logging
import re
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

logger = logging.getLogger(__name__)

_BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


class GPTQ:
    """See the module. ``dynamic`` maps patterns to settings of their own: the first that matches a module counts."""

    name = "gptq"
    markers = ("qweight",)
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        meta = settings.get("meta")
        declared = settings.get("checkpoint_format") or (meta.get("checkpoint_format") if isinstance(meta, dict) else 0)
        self._format = declared or "gptq"
        if self._format not in _FORMATS:
            raise ModelError(
                f"quantization_config: checkpoint_format {self._format!r} is not read; {' and '.join(_FORMATS)} are"
            )
        self._size(settings)
        self._warned = False

    def promise(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> QuantizedWeight:
        """The weight's form and shape from the shapes of its parts."""
        bits, group = self._size(self._of(module))
        rows, columns = shapes["qweight"][1], shapes["qweight"][0] * 32 // bits
        return promised(integer_form(bits, group, columns), rows, columns)

    def form(self, module: str, columns: int) -> WeightForm:
        """By the settings alone."""
        return integer_form(*self._size(self._of(module)), columns)

    def weight(self, module: str, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """The weight of ``module`` [O, I]."""
        settings = self._of(module)
        bits, group = self._size(settings)
        words = int32_words(f"{module}.qweight", tensors["qweight"]).T.contiguous()
        if words.shape[1] * 32 % bits:
            raise ModelError(
                f"tensor {module}.qweight has {words.shape[1]} rows, which do not hold whole {bits}-bit values"
            )
        codes = unpack(words, bits)
        rows, columns = codes.shape
        groups = groups_of(columns, group)
        scale = scales(f"{module}.scales", tensors["scales"])
        expect(f"{module}.scales", scale.shape, (groups, rows))
        zero: torch.Tensor = torch.full((rows, groups), 1 << (bits - 1), dtype=torch.uint8)
        symmetric, act_order = bool(settings.get("sym", True)), bool(settings.get("desc_act", False))
        if "qzeros" in tensors:
            expect(f"{module}.qzeros", tensors["qzeros"].shape, (groups, rows * bits // 32))
            if rows * bits % 32:
                raise ModelError(f"tensor {module}.qzeros: {rows} zeros of {bits} bits do not fill whole words")
            stored = unpack(int32_words(f"{module}.qzeros", tensors["qzeros"]), bits)
            zero = self._zeros(module, stored, bits, symmetric).T
        elif not symmetric:
            raise KeyError("qzeros")
        if act_order and groups > 1 and "g_idx" not in tensors:
            raise KeyError("g_idx")
        perm = permutation(f"{module}.g_idx", tensors.get("g_idx"), columns, group, act_order)
        return integer_weight(codes, scale.T.contiguous(), zero.contiguous(), bits, group, perm)

    def _of(self, module: str) -> Mapping[str, Any]:
        for pattern, changes in (self._settings.get("dynamic") or {}).items():
            if not re.match(pattern.removeprefix("+:").removeprefix("-:"), module):
                continue
            if pattern.startswith("-:"):
                raise ModelError(
                    f"tensor {module}.qweight is there, but quantization_config: dynamic leaves it out ({pattern!r})"
                )
            return {**self._settings, **changes}
        return self._settings

    def _size(self, settings: Mapping[str, Any]) -> tuple[int, int]:
        bits, group = number(settings, "bits"), number(settings, "group_size", -1)
        if bits not in _BITS:
            raise ModelError(f"quantization_config: bits is {bits}; {', '.join(map(str, _BITS))} are read")
        return bits, group

    def _zeros(self, module: str, stored: torch.Tensor, bits: int, symmetric: bool) -> torch.Tensor:
        """Zero points of 0 are stored as all ones by the first format, so the sum wraps around.

        Symmetric weights have all zeros in the middle, so the file itself shows which format it has.
        """
        middle, second = 1 << (bits - 1), self._format == "gptq_v2"
        if symmetric:
            shown = bool((stored == middle).all()) or (second and not bool((stored == middle - 1).all()))
            if shown != second and not self._warned:
                self._warned = True
                logger.warning(
                    "quantization_config says %s, but the zeros of %s are stored as %s does; the file is right",
                    self._format,
                    module,
                    _FORMATS[shown],
                )
            second = shown
        return stored if second else (stored + 1) & ((1 << bits) - 1)


def permutation(
    name: str, g_idx: torch.Tensor | None, columns: int, group: int, act_order: bool
) -> torch.Tensor | None:
    """The order of inputs in which groups lie side by side; None where they do already.

    ``g_idx`` [I], called ``name``, is the group of each input. Raises ``ModelError`` where groups differ in size.
    """
    if g_idx is None or groups_of(columns, group) == 1:
        return None
    expect(name, g_idx.shape, (columns,))
    plain = torch.arange(columns) // group
    g_idx = g_idx.long()
    if torch.equal(g_idx, plain) or (not act_order and not bool(g_idx.any())):  # some writers leave it empty
        return None
    perm = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[perm], plain):
        raise ModelError(
            f"tensor {name} does not put {group} inputs into each group; the file is damaged, or group_size is wrong"
        )
    return perm
