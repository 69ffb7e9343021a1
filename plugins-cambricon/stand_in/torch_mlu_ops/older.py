"""Names of releases before 1.12."""

from __future__ import annotations

import torch
from qiao_conformance.sim import kernels
from torch_mlu.graphs import operation

from torch_mlu_ops._rules import ask
from torch_mlu_ops.linear import int4_product, int8_product, quantized, weight8_product

Tensor = torch.Tensor


@operation
def per_token_smooth_quantize(x: Tensor, smooth: Tensor) -> tuple[Tensor, Tensor]:
    """Demands a smooth vector."""
    ask(smooth.dtype == torch.float32 and smooth.shape == x.shape[1:], "per_token_smooth_quantize: smooth [k]")
    ask(bool((kernels.raw(smooth) == 1).all()), "the stand-in smooths by ones only")
    return quantized(x, "per_token_smooth_quantize")


@operation
def smooth_quant_matmul(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    act_mode: str = "none",
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """int8 by int8."""
    return int8_product(a, a_scale, b, b_scale, dtype, bias, "smooth_quant_matmul")


@operation
def weight_only_quant_matmul(
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    act_mode: str = "none",
    quant_bit_size: int = 8,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """Symmetric weights of 4 or 8 bits."""
    ask(quant_bit_size in (4, 8) and zero is None, "weight_only_quant_matmul: 4 or 8 bits, symmetric")
    if quant_bit_size == 8:
        return weight8_product(a, b, scale, bias, "weight_only_quant_matmul")
    return int4_product(a, b, scale, bias, a.dtype, "weight_only_quant_matmul")
