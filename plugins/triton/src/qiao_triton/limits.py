"""What the kernels take, as the contract's data; the plugins add what their chips say. Nothing here needs Triton."""

from __future__ import annotations

from qiao.contract import Capabilities

from qiao_triton.architectures import Architecture, head_dims_of

BLOCK_SIZES = (16, 32, 64)
SCHEMES = ("dense", "w4a16", "w8a16", "w8a8", "fp8")


def limits(arch: Architecture, dtypes: tuple[str, ...]) -> Capabilities:
    """For a chip of ``arch`` that computes in ``dtypes``; its cache may be of any of them or int8."""
    return Capabilities(
        dtypes=dtypes,
        kv_layouts=("NHD",),
        kv_dtypes=(*dtypes, "int8"),
        block_sizes=BLOCK_SIZES,
        head_dims=head_dims_of(arch),
        schemes=SCHEMES,
    )
