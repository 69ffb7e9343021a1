"""What the generations of MLU can do, and the limits of torch_mlu_ops that its kernels do not all check themselves."""

from __future__ import annotations

from qiao.contract import Capabilities

from qiao_cambricon import _sdk

BLOCK = 16
"""Paged prefill takes no other block size; decode takes it as well."""

HEAD_DIMS = (32, 64, 80, 96, 128, 160, 192, 224, 256, 512, 576)
GROUPS = (64, 128, 256, 512)
"""Group sizes of 4-bit weights."""

MOST_HEADS_TO_A_KEY_HEAD = 128
"""Of a decode: queries times heads over key heads."""


def generation(chip: str) -> int:
    """3 of MLU370, 5 of MLU590 and MLU580; 5 for the usual chip."""
    digits = chip.upper().removeprefix("MLU")[:1]
    return int(digits) if digits.isdigit() else 5


def capabilities_of(chip: str) -> Capabilities:
    """MLU370 has no bfloat16. Schemes are those that the installed torch_mlu_ops has operations for."""
    dtypes = ("bfloat16", "float16", "float32") if generation(chip) >= 5 else ("float16", "float32")
    return Capabilities(
        dtypes=dtypes,
        kv_layouts=("HND",),
        block_sizes=(BLOCK,),
        head_dims=HEAD_DIMS,
        schemes=("dense", *quantized_schemes()),
        soft_cap=False,
        sdk=_sdk.versions(),
    )


def quantized_schemes() -> tuple[str, ...]:
    """``w4a16`` and ``w8a8`` where either generation's operations are there, and both where nothing is installed."""
    if _sdk.operations() is None:
        return ("w4a16", "w8a8")
    four = _sdk.has("scaled_matmul") or _sdk.has("weight_only_quant_matmul")
    eight = _sdk.has("scaled_quantize", "scaled_matmul") or _sdk.has("per_token_smooth_quantize", "smooth_quant_matmul")
    return (("w4a16",) if four else ()) + (("w8a8",) if eight else ())


def check_cache(block_size: int, head_dim: int, layout: str) -> None:
    """Raises ``ValueError`` for a cache that the kernels cannot read."""
    if layout != "HND" or block_size != BLOCK or head_dim not in HEAD_DIMS:
        raise ValueError(
            f"torch_mlu_ops has no {layout} cache of blocks of {block_size} and heads of {head_dim}: HND, blocks of "
            f"{BLOCK}, heads of {', '.join(map(str, HEAD_DIMS))}"
        )


def check_decode(heads: int, kv_heads: int) -> None:
    """Raises ``ValueError`` for more query heads to a key head than the decode kernel takes."""
    if heads > MOST_HEADS_TO_A_KEY_HEAD * kv_heads:
        raise ValueError(
            f"{heads} heads over {kv_heads} key heads: decode takes {MOST_HEADS_TO_A_KEY_HEAD} to one at most"
        )
