"""Qiao's plugin for Cambricon MLUs: the hooks that are imported here are those that Qiao finds."""

from qiao_cambricon.cache import allocate_kv, attention, copy_blocks, decode_attention, write_kv
from qiao_cambricon.device import capabilities, collective_backend, memory_info, probe_devices, synchronize
from qiao_cambricon.fused import add_rms_norm, rms_norm, silu_mul
from qiao_cambricon.linear import matmul, pack_weight

__all__ = [
    "add_rms_norm",
    "allocate_kv",
    "attention",
    "capabilities",
    "collective_backend",
    "copy_blocks",
    "decode_attention",
    "matmul",
    "memory_info",
    "pack_weight",
    "probe_devices",
    "rms_norm",
    "silu_mul",
    "synchronize",
    "write_kv",
]
