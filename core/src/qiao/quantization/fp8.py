"""FP8 checkpoints: ``weight`` float8_e4m3fn [O, I] with ``weight_scale`` of one number, or of one for each output.

Weights with a scale for each block of rows and columns (``weight_scale_inv``, DeepSeek) have no form in the contract
and become floating point; float8_e5m2 is refused. Scales of activations are not used: activations stay as they are.
``fbgemm_fp8`` (Meta) and ``modelopt`` (NVIDIA, ``quant_algo`` FP8) name their tensors in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qiao.errors import ModelError
from qiao.quantization.packing import expect, promised, scales
from qiao.quantization.weight import QuantizedWeight, Weight, WeightForm

FORM = WeightForm("fp8")


class FP8:
    """See the module."""

    markers = ("weight_scale", "weight_scale_inv")
    parts = ("weight", "weight_scale", "weight_scale_inv", "input_scale")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.name = str(settings.get("quant_method", "fp8"))
        algorithm = settings.get("quant_algo", "FP8")
        if algorithm != "FP8":
            raise ModelError(f"quantization_config: quant_algo {algorithm!r} of {self.name} is not read; FP8 is")
        block = settings.get("weight_block_size")
        self._block = tuple(block) if block else None

    def promise(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> QuantizedWeight | None:
        """The weight's form and shape from the shapes of its parts; None where it becomes floating point."""
        rows, columns = shapes["weight"]
        return None if self._block else promised(FORM, rows, columns)

    def form(self, module: str, columns: int) -> WeightForm | None:
        """By the settings alone."""
        return None if self._block else FORM

    def weight(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Weight:
        """The weight of ``module`` [O, I]."""
        values = tensors["weight"]
        if values.dim() != 2:
            raise ModelError(
                f"tensor {module}.weight has shape {list(values.shape)}; a linear weight has two dimensions"
            )
        scale = tensors.get("weight_scale", tensors.get("weight_scale_inv"))
        assert scale is not None, "a marker is there"
        if self._block:
            return fp8_blocks(module, values, scale, self._block, "weight_scale_inv")
        return fp8_weight(module, values, scale)


def fp8_weight(module: str, values: torch.Tensor, scale: torch.Tensor) -> QuantizedWeight:
    """``values`` [O, I] float8_e4m3fn with ``scale`` of 1 or O numbers."""
    values, scale = _codes(module, values), scales(f"{module}.weight_scale", scale)
    if scale.numel() not in (1, values.shape[0]):
        expect(f"{module}.weight_scale", scale.shape, (values.shape[0], 1))
    return QuantizedWeight(FORM, {"weight": values, "scale": scale.float().reshape(-1, 1)})


def _codes(module: str, values: torch.Tensor) -> torch.Tensor:
    if values.dtype != torch.float8_e4m3fn:
        kind = str(values.dtype).removeprefix("torch.")
        raise ModelError(f"tensor {module}.weight is {kind}; fp8 weights are read as float8_e4m3fn")
    if bool(((values.view(torch.uint8) & 127) == 127).any()):
        raise ModelError(f"tensor {module}.weight holds NaN. The file is damaged or badly quantized.")
    return values


def fp8_blocks(
    module: str, values: torch.Tensor, scale: torch.Tensor, block: tuple[int, ...], part: str
) -> torch.Tensor:
    """``values`` [O, I] float8_e4m3fn as float32; ``scale``, called ``part``, is for ``block`` rows and columns."""
    values, scale = _codes(module, values), scales(f"{module}.{part}", scale).float()
    rows, columns = values.shape
    expect(f"{module}.{part}", scale.shape, (-(-rows // block[0]), -(-columns // block[1])))
    spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return spread.mul_(values.float())
