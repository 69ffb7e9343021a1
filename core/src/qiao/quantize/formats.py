"""Rounded weights as the tensors of AutoGPTQ's and AutoAWQ's checkpoints. ``qiao.quantization`` reads them."""

from __future__ import annotations

import torch

from qiao.errors import ModelError
from qiao.quantization.awq import GEMM_ORDER
from qiao.quantization.packing import pack
from qiao.quantize.grid import Rounded
from qiao.quantize.options import Options


def check_shape(name: str, shape: tuple[int, ...], options: Options) -> None:
    """Raise ``ModelError`` naming the tensor where a weight [O, I] cannot be written with ``options``."""
    rows, columns = shape
    if options.group > 0 and columns % options.group:
        fitting = [str(g) for g in (128, 64, 32) if columns % g == 0]
        raise ModelError(
            f"tensor {name}: its {columns} inputs do not make whole groups of {options.group}; "
            f"--group {' or '.join([*fitting, '-1'])} would"
        )
    if options.method == "awq":
        if rows % len(GEMM_ORDER):
            raise ModelError(f"tensor {name}: AWQ's words hold 8 outputs, which {rows} do not fill; use --method gptq")
        return
    for count, what in ((rows, "outputs"), (columns, "inputs")):
        if count * options.bits % 32:
            raise ModelError(
                f"tensor {name}: its {count} {what} of {options.bits} bits do not fill whole words of 32 bits, which "
                "GPTQ's format needs; try --bits 8 or 4"
            )


def write_weight(weight: Rounded, options: Options, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of one linear layer by their last names; scales in ``dtype``."""
    if options.method == "awq":
        return {
            "qweight": pack(_slots(weight.codes.T), 4),
            "qzeros": pack(_slots(weight.zero.T), 4),
            "scales": weight.scale.T.to(dtype).contiguous(),
        }
    return {
        "qweight": pack(weight.codes, options.bits).T.contiguous(),
        "qzeros": pack((weight.zero - 1).T.contiguous(), options.bits),
        "scales": weight.scale.T.to(dtype).contiguous(),
        "g_idx": weight.group.to(torch.int32),
    }


def _slots(codes: torch.Tensor) -> torch.Tensor:
    """[n, O] in the order in which gemm's words take them."""
    return codes.contiguous().view(codes.shape[0], -1, len(GEMM_ORDER))[..., list(GEMM_ORDER)].flatten(1)
