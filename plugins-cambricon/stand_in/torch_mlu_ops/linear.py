"""Products: what both generations of names share."""

from __future__ import annotations

import torch
from qiao_conformance.sim import kernels
from torch_mlu.graphs import operation

from torch_mlu_ops._rules import ask, enter, same_dtype

Tensor = torch.Tensor


@operation
def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    act_mode: str = "none",
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Tensor:
    """a [m, k], b [n, k]."""
    index = enter("matmul", a, b, bias)
    same_dtype("matmul", a, b, bias)
    ask(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[1], "matmul: a [m, k] and b [n, k]")
    out = kernels.raw(a).float() @ kernels.raw(b).float().T * alpha
    out = out if bias is None else out + kernels.raw(bias).float()
    return kernels.result("tmo.matmul", out.to(a.dtype), index)


def int4_product(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, name: str) -> Tensor:
    """Activations by symmetric 4-bit weights, two in a byte, a scale for each group."""
    index = enter(name, a, b, scale, bias)
    same_dtype(name, a, scale, bias)
    ask(b.dtype == torch.int8 and b.shape[1] * 2 == a.shape[1], f"{name}: b is int8 [n, k/2]")
    group = a.shape[1] // scale.shape[1]
    ask(group in (64, 128, 256, 512), f"{name}: group size {group}")
    codes = kernels.raw(b).view(torch.uint8).to(torch.int16)
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    signed = torch.where(both > 7, both - 16, both).float()
    value = signed * kernels.raw(scale).float().repeat_interleave(group, 1)
    out = kernels.raw(a).float() @ value.T
    out = out if bias is None else out + kernels.raw(bias).float()
    return kernels.result(f"tmo.{name}", out.to(dtype), index)


def weight8_product(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """Activations by int8 weights: a float32 scale for each row, or one for each group in the activations' dtype."""
    index = enter(name, a, b, scale, bias)
    same_dtype(name, a, bias)
    ask(b.dtype == torch.int8 and b.shape[1] == a.shape[1], f"{name}: b is int8 [n, k]")
    if scale.dim() == 1:
        ask(scale.dtype == torch.float32 and scale.shape == b.shape[:1], f"{name}: a float32 scale for each row")
        value = kernels.raw(b).float() * kernels.raw(scale)[:, None]
    else:
        group = a.shape[1] // scale.shape[1]
        ask(group in (64, 128, 256, 512), f"{name}: group size {group}")
        ask(scale.dtype == a.dtype, f"{name}: scales of groups are of a's dtype")
        value = kernels.raw(b).float() * kernels.raw(scale).float().repeat_interleave(group, 1)
    out = kernels.raw(a).float() @ value.T
    out = out if bias is None else out + kernels.raw(bias).float()
    return kernels.result(f"tmo.{name}", out.to(a.dtype), index)


def int8_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None, name: str
) -> Tensor:
    """int8 by int8, a scale for each row of both."""
    index = enter(name, a, a_scale, b, b_scale, bias)
    ask(a.dtype == b.dtype == torch.int8, f"{name}: a and b are int8")
    ask(a_scale.dtype == b_scale.dtype == torch.float32, f"{name}: scales are float32")
    ask(a_scale.shape == a.shape[:1] and b_scale.shape == b.shape[:1], f"{name}: one scale a row")
    whole = kernels.raw(a).double() @ kernels.raw(b).double().T
    out = whole * kernels.raw(a_scale).double()[:, None] * kernels.raw(b_scale).double()[None]
    out = out if bias is None else out + kernels.raw(bias).double()
    return kernels.result(f"tmo.{name}", out.to(dtype), index)


def quantized(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """int8 codes and a scale for each row."""
    index = enter(name, x)
    wide = kernels.raw(x).float()
    step = wide.abs().amax(1) / 127
    codes = (wide / torch.where(step > 0, step, 1.0)[:, None]).round().clamp(-127, 127).to(torch.int8)
    return kernels.wrap(codes, index), kernels.wrap(step, index)
