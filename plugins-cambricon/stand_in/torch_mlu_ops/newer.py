"""Names since 1.12."""

from __future__ import annotations

import torch
from torch_mlu.graphs import operation

from torch_mlu_ops._rules import ask
from torch_mlu_ops.linear import int4_product, int8_product, quantized

Tensor = torch.Tensor


@operation
def scaled_quantize(
    x: Tensor, *, quant_type: torch.dtype = torch.int8, quant_mode: str = "dynamic_per_token"
) -> tuple[Tensor, Tensor]:
    """(codes, a float32 scale for each row)."""
    ask(quant_type == torch.int8 and quant_mode == "dynamic_per_token", "scaled_quantize: int8, per token")
    return quantized(x, "scaled_quantize")


@operation
def scaled_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    act_mode: str = "none",
    quant_bit_size: int = 8,
) -> Tensor:
    """int8 by int8, or activations by symmetric 4-bit weights."""
    if quant_bit_size == 4:
        ask(a_scale is None, "scaled_matmul: activations of 4-bit weights have no scale")
        return int4_product(a, b, b_scale, bias, out_dtype, "scaled_matmul")
    ask(a_scale is not None, "scaled_matmul: int8 needs a_scale")
    return int8_product(a, a_scale, b, b_scale, out_dtype, bias, "scaled_matmul")
