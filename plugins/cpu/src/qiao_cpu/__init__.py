"""Hooks of the contract on native kernels: importing this loads the library and chooses the instruction set."""

from qiao_cpu.attention import attention, decode_attention, write_kv
from qiao_cpu.cache import allocate_kv, copy_blocks
from qiao_cpu.capture import capture
from qiao_cpu.device import capabilities, memory_info, probe_devices, set_threads, synchronize
from qiao_cpu.fused import (
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
from qiao_cpu.matmul import expert_matmul, matmul, pack_weight
from qiao_cpu.restore import restore_weight
from qiao_cpu.sampling import sample

__all__ = [
    "add_rms_norm",
    "allocate_kv",
    "attention",
    "cap_logits",
    "capabilities",
    "capture",
    "combine_experts",
    "copy_blocks",
    "decode_attention",
    "expert_matmul",
    "gelu_mul",
    "matmul",
    "memory_info",
    "pack_weight",
    "probe_devices",
    "restore_weight",
    "rms_norm",
    "rope_write_kv",
    "rotary",
    "route_experts",
    "sample",
    "set_threads",
    "silu_mul",
    "synchronize",
    "write_kv",
]
