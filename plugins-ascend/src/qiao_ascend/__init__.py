"""Qiao's plugin for Huawei Ascend NPUs: the hooks that are imported here are those that Qiao finds."""

from qiao_ascend.cache import allocate_kv, attention, copy_blocks, write_kv
from qiao_ascend.device import (
    capabilities,
    collective_backend,
    memory_info,
    probe_devices,
    synchronize,
    utilization,
)
from qiao_ascend.fused import add_rms_norm, rms_norm, rotary, route_experts, silu_mul
from qiao_ascend.graphs import capture
from qiao_ascend.linear import expert_matmul, matmul, pack_weight
from qiao_ascend.sampling import sample

__all__ = [
    "add_rms_norm",
    "allocate_kv",
    "attention",
    "capabilities",
    "capture",
    "collective_backend",
    "copy_blocks",
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
    "synchronize",
    "utilization",
    "write_kv",
]
