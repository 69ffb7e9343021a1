"""Qiao's plugin for Hygon DCUs: the hooks that are imported here are those that Qiao finds."""

from qiao_triton.attention import attention, decode_attention
from qiao_triton.cache import allocate_kv, copy_blocks, write_kv
from qiao_triton.fused import (
    add_rms_norm,
    cap_logits,
    combine_experts,
    gelu_mul,
    rms_norm,
    rope_write_kv,
    rotary,
    route_experts,
    silu_mul,
)
from qiao_triton.gpu import capture, collective_backend, memory_info, synchronize
from qiao_triton.matmul import expert_matmul, matmul
from qiao_triton.sampling import apply_penalties, sample

from qiao_dcu.device import (
    capabilities,
    probe_devices,
    utilization,
)
from qiao_dcu.loading import pack_weight, swap_blocks

__all__ = [
    "add_rms_norm",
    "allocate_kv",
    "apply_penalties",
    "attention",
    "cap_logits",
    "capabilities",
    "capture",
    "collective_backend",
    "combine_experts",
    "copy_blocks",
    "decode_attention",
    "expert_matmul",
    "gelu_mul",
    "matmul",
    "memory_info",
    "pack_weight",
    "probe_devices",
    "rms_norm",
    "rope_write_kv",
    "rotary",
    "route_experts",
    "sample",
    "silu_mul",
    "swap_blocks",
    "synchronize",
    "utilization",
    "write_kv",
]
