"""Qiao's plugin for NVIDIA GPUs: the hooks that are imported here are those that Qiao finds."""

from qiao_triton.cache import allocate_kv, copy_blocks, swap_blocks, write_kv
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
from qiao_triton.matmul import expert_matmul, matmul, pack_weight
from qiao_triton.sampling import apply_penalties, sample

from qiao_cuda.attention import attention, decode_attention, prepare_attention
from qiao_cuda.device import (
    capabilities,
    probe_devices,
    utilization,
)

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
    "prepare_attention",
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
