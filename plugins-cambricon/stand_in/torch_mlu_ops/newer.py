"""Names since 1.12, by the signatures and docstrings that Cambricon/vllm-mlu publishes for them."""

from __future__ import annotations

import torch
from torch_mlu.graphs import operation

from torch_mlu_ops._rules import ask
from torch_mlu_ops.linear import int4_product, int8_product, quantized, weight8_product

Tensor = torch.Tensor


@operation
def scaled_quantize(
    input: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    scale_ub: Tensor | None = None,
    quant_type: torch.dtype = torch.int8,
    quant_mode: str = "dynamic_per_token",
) -> tuple[Tensor, Tensor]:
    """(codes, a float32 scale for each row)."""
    ask(scale is zero is scale_ub is None, "scaled_quantize: the stand-in smooths nothing")
    ask(quant_type == torch.int8 and quant_mode == "dynamic_per_token", "scaled_quantize: int8, per token")
    return quantized(input, "scaled_quantize")


@operation
def scaled_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    output_dtype: torch.dtype,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    act_mode: str = "none",
    quant_bit_size: int = 8,
    alpha: float = 1.0,
    beta: float = 1.0,
    use_hp_active: bool = False,
    a_quant_bit_size: int = 8,
    a_calib: Tensor | None = None,
    b_calib: Tensor | None = None,
) -> Tensor:
    """int8 by int8, or activations of 16 bits by symmetric weights of 4 or 8 bits."""
    name = "scaled_matmul"
    ask(output_dtype in (torch.float16, torch.bfloat16), f"{name}: the result is float16 or bfloat16")
    ask(c is None and act_mode == "none" and alpha == 1.0, f"{name}: the stand-in adds and activates nothing")
    ask((a_quant_bit_size == -1) == (a_scale is None), f"{name}: a_quant_bit_size is -1 for plain activations only")
    if a_scale is not None:
        return int8_product(a, a_scale, b, b_scale, output_dtype, bias, name)
    ask(a.dtype == output_dtype, f"{name}: the result is of a's dtype")
    if quant_bit_size == 4:
        return int4_product(a, b, b_scale, bias, output_dtype, name)
    return weight8_product(a, b, b_scale, bias, name)
