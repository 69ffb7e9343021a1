"""The frozen table of plain functions that models, layers and the engine call.

The binder fills it once at start; nothing behind it reaches pluggy. A slot that is placed on the host holds a wrapper
that copies activations across, calls the host's function, and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import unwrap
from typing import Any

import torch

from qiao.contract import KVCache, LogprobOutput, MemoryInfo, PackedWeight, WeightInfo

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class MatmulOps:
    """The bound operators of one weight scheme, ``expert_matmul`` None where it is absent.
    ``device`` is where the packed weights and biases lie."""

    device: str
    pack_weight: Callable[[str, Mapping[str, Tensor], WeightInfo, str], PackedWeight]
    matmul: Callable[[Tensor, PackedWeight, Tensor | None], Tensor]
    expert_matmul: Callable[[Tensor, Sequence[PackedWeight], Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class OpTable:
    """One slot per operator; see ``qiao.contract`` for arguments and shapes, in the order given there.

    ``device`` is where activations, embeddings and norms lie, ``kv_device`` the cache and the attention metadata,
    ``sample_device`` the sampling tensors (torch device strings). ``stage_logits`` brings logits to
    ``sample_device`` and is the identity where that is ``device``. Optional hooks with a composite are always
    callable; those without (``decode_attention``, ``prepare_attention``, ``rope_write_kv``, ``swap_blocks``,
    ``capture``, ``utilization``) are None when absent. ``capture_sizes`` are the device's (``Capabilities``).
    """

    device: str
    kv_device: str
    sample_device: str
    kv_layout: str
    memory_info: Callable[[str], MemoryInfo]
    synchronize: Callable[[str], None]
    allocate_kv: Callable[[int, int, int, int, torch.dtype, str, str], KVCache]
    copy_blocks: Callable[[KVCache, Tensor, Tensor], None]
    write_kv: Callable[[Tensor, Tensor, KVCache, Tensor], None]
    attention: Callable[..., Tensor]
    stage_logits: Callable[[Tensor], Tensor]
    sample: Callable[..., Tensor]
    apply_penalties: Callable[..., Tensor]
    logprobs: Callable[[Tensor, Tensor, int], LogprobOutput]
    matmul: Mapping[str, MatmulOps]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    gelu_mul: Callable[[Tensor], Tensor]
    cap_logits: Callable[[Tensor, float], Tensor]
    route_experts: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    combine_experts: Callable[[Tensor, Tensor], Tensor]
    decode_attention: Callable[..., Tensor] | None = None
    prepare_attention: Callable[..., Any] | None = None
    rope_write_kv: Callable[..., Tensor] | None = None
    swap_blocks: Callable[..., None] | None = None
    capture: Callable[..., Callable[[], Any]] | None = None
    capture_sizes: tuple[int, ...] = ()
    utilization: Callable[[str], float] | None = None


def operator_of(table: OpTable, error: BaseException) -> str | None:
    """The operator of ``table`` that raised ``error``, read from the traceback; None where it was none of them.

    Operators of the device are bound as they are, so their errors arrive raw; this costs nothing until one is raised.
    """
    codes: dict[Any, str] = {}
    for field in fields(table):
        _note_code(codes, field.name, getattr(table, field.name))
    for ops in table.matmul.values():
        _note_code(codes, "pack_weight", ops.pack_weight)
        _note_code(codes, "matmul", ops.matmul)
        _note_code(codes, "expert_matmul", ops.expert_matmul)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return codes[trace.tb_frame.f_code]
        trace = trace.tb_next
    return None


def _note_code(codes: dict[Any, str], name: str, function: Any) -> None:
    code = getattr(unwrap(function), "__code__", None) if callable(function) else None
    if code is not None:
        codes.setdefault(code, name)
