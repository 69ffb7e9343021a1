"""Every hook of the contract in plain torch on the CPU: last resort, and the first thing to read for plugin authors."""

from qiao_reference.allocation import allocate_kv, copy_blocks, swap_blocks
from qiao_reference.attention import attention, decode_attention, prepare_attention, write_kv
from qiao_reference.device import (
    capabilities,
    capture,
    collective_backend,
    memory_info,
    probe_devices,
    synchronize,
    utilization,
)
from qiao_reference.fused import (
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
from qiao_reference.matmul import expert_matmul, matmul, pack_weight, restore_weight
from qiao_reference.sampling import apply_penalties, logprobs, sample
from qiao_reference.threads import set_threads

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
    "logprobs",
    "matmul",
    "memory_info",
    "pack_weight",
    "prepare_attention",
    "probe_devices",
    "restore_weight",
    "rms_norm",
    "rope_write_kv",
    "rotary",
    "route_experts",
    "sample",
    "set_threads",
    "silu_mul",
    "swap_blocks",
    "synchronize",
    "utilization",
    "write_kv",
]
