"""Qiao's plugin for Cambricon MLUs: the hooks that are imported here are those that Qiao finds."""

from qiao_cambricon.cache import allocate_kv, attention, copy_blocks, decode_attention, swap_blocks, write_kv
from qiao_cambricon.device import capabilities, collective_backend, memory_info, probe_devices, synchronize
from qiao_cambricon.experts import combine_experts, expert_matmul, route_experts
from qiao_cambricon.fused import add_rms_norm, rms_norm, rotary, silu_mul
from qiao_cambricon.graphs import capture
from qiao_cambricon.linear import matmul, pack_weight
from qiao_cambricon.sampling import sample

__all__ = [
    "add_rms_norm",
    "allocate_kv",
    "attention",
    "capabilities",
    "capture",
    "collective_backend",
    "combine_experts",
    "copy_blocks",
    "decode_attention",
    "expert_matmul",
    "matmul",
    "memory_info",
    "pack_weight",
    "probe_devices",
    "rms_norm",
    "rotary",
    "route_experts",
    "sample",
    "silu_mul",
    "swap_blocks",
    "synchronize",
    "write_kv",
]
