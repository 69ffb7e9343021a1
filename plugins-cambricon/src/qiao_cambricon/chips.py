"""What the generations of MLU can do."""

from __future__ import annotations

from qiao.contract import Capabilities, Tolerance

from qiao_cambricon import _sdk
from qiao_cambricon.rules import BLOCK, HEAD_DIMS

CAPTURED = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of sequences for which decode steps are recorded; steps between are filled up with slots of -1."""

_ROTARY = {"float16": Tolerance(4e-3, 4e-3), "bfloat16": Tolerance(3.2e-2, 3.2e-2)}
"""Twice the catalog's: ``apply_rotary`` wants sine and cosine in the activations' dtype."""


def generation(chip: str) -> int:
    """3 of MLU370, 5 of MLU590 and MLU580; 5 for the usual chip."""
    digits = chip.upper().removeprefix("MLU")[:1]
    return int(digits) if digits.isdigit() else 5


def capabilities_of(chip: str) -> Capabilities:
    """MLU370 has no bfloat16. Schemes are those that the installed torch_mlu_ops has operations for."""
    dtypes = ("bfloat16", "float16", "float32") if generation(chip) >= 5 else ("float16", "float32")
    rotary = {("rotary", name): loose for name, loose in _ROTARY.items() if name in dtypes}
    return Capabilities(
        dtypes=dtypes,
        kv_layouts=("HND",),
        kv_dtypes=(*dtypes, *cache_integers()),
        block_sizes=(BLOCK,),
        head_dims=HEAD_DIMS,
        schemes=("dense", *quantized_schemes()),
        soft_cap=False,
        sdk=_sdk.versions(),
        capture_sizes=CAPTURED,
        tolerances=rotary,
    )


def cache_integers() -> tuple[str, ...]:
    """``int8`` where the cache can be written and read with scales, or where nothing is installed."""
    there = _sdk.operations() is None or _sdk.has("quant_to_paged_cache", "dequant_from_paged_cache")
    return ("int8",) if there else ()


def quantized_schemes() -> tuple[str, ...]:
    """Schemes of which either generation's operations are there, and all where nothing is installed.

    ``w8a16`` is dequantized at load where there is no operation for it.
    """
    if _sdk.operations() is None:
        return ("w4a16", "w8a16", "w8a8")
    four = _sdk.has("scaled_matmul") or _sdk.has("weight_only_quant_matmul")
    eight = _sdk.has("scaled_quantize", "scaled_matmul") or _sdk.has("per_token_smooth_quantize", "smooth_quant_matmul")
    return (*(("w4a16",) if four else ()), "w8a16", *(("w8a8",) if eight else ()))
