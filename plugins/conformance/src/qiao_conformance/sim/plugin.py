"""The plugin ``sim``: every hook of the contract, on the simulated accelerator.

For the command line: ``QIAO_SIM_DEVICES`` (how many; when set, ``auto`` takes the device), ``QIAO_SIM_MEMORY`` (bytes
each, or like ``512MiB``), ``QIAO_SIM_CHIP`` (a profile of ``sim.CHIPS``), ``QIAO_SIM_DROP`` (hooks to leave out, with
commas between).
Each hook counts as one launch named ``hook.<name>`` and can be made to fail with ``sim.fail("hook.<name>")``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
from qiao.contract import (
    CATALOG,
    AttentionMetadata,
    Capabilities,
    DeviceInfo,
    KVCache,
    LogprobOutput,
    MemoryInfo,
    PackedWeight,
    PenaltyTensors,
    SamplingTensors,
    WeightInfo,
    composites,
    hookimpl,
)
from torch.utils import _pytree as pytree

from qiao_conformance.sim import kernels
from qiao_conformance.sim.backend import registered
from qiao_conformance.sim.chips import chip as profile
from qiao_conformance.sim.fused import (  # noqa: F401
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
from qiao_conformance.sim.knobs import setup
from qiao_conformance.sim.state import NAME, STATE

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_DEFAULT_MEMORY = 2 << 30


def _bytes(text: str) -> int:
    number, unit = text.strip(), 1
    for suffix, size in _UNITS.items():
        if number.endswith(suffix):
            number, unit = number.removesuffix(suffix), size
    try:
        return int(float(number) * unit)
    except ValueError:
        raise ValueError(f"QIAO_SIM_MEMORY={text!r} is not a size such as 1073741824 or 512MiB") from None


def _slot_is_free() -> bool:
    """Whether torch's only slot for a backend from outside is unused and no installed package is going to take it."""
    taken = torch._C._get_privateuse1_backend_name() != "privateuseone"
    return not taken and not metadata.entry_points(group="torch.backends")


@hookimpl
def probe_devices() -> list[DeviceInfo]:
    """The simulated devices. Score 0, which is "only if asked for by name", unless ``QIAO_SIM_DEVICES`` is set."""
    wanted = os.environ.get("QIAO_SIM_DEVICES", "")
    if not registered() and not wanted and not _slot_is_free():
        return []
    if not STATE.devices:
        memory = os.environ.get("QIAO_SIM_MEMORY", "")
        setup(int(wanted or 1), _bytes(memory) if memory else _DEFAULT_MEMORY, os.environ.get("QIAO_SIM_CHIP", "full"))
    evidence = f"simulated, chip {STATE.chip}; " + (f"QIAO_SIM_DEVICES={wanted}" if wanted else "used only by name")
    return [
        DeviceInfo(f"sim:{d.index}", f"{NAME}:{d.index}", STATE.chip, 50 if wanted else 0, evidence, d.memory)
        for d in STATE.devices
    ]


@hookimpl
def capabilities(chip: str) -> Capabilities:
    """The profile's; raises ``ValueError`` for a chip that there is not."""
    return profile(chip).capabilities


@hookimpl
def memory_info(device: str) -> MemoryInfo:
    """The device's own bookkeeping."""
    found = STATE.alive(STATE.index_of(device))
    return MemoryInfo(found.memory - found.used, found.memory)


@hookimpl
def synchronize(device: str) -> None:
    """Late faults raise here."""
    STATE.synchronize(STATE.index_of(device))


@hookimpl
def utilization(device: str) -> float:
    """Share of the device's memory in use: there is no time on this device to measure."""
    found = STATE.alive(STATE.index_of(device))
    return found.used / found.memory if found.memory else 0.0


@hookimpl
def set_threads(count: int | None) -> str:
    """Nothing to set: what computes in place of the device takes the threads that torch has."""
    if count is not None and count < 1:
        raise ValueError(f"threads must be at least 1, got {count}")
    return "no threads of its own: the device is simulated"


@hookimpl
def capture(function: Callable[..., Any], example: tuple[Any, ...], device: str) -> Callable[[], Any]:
    """Run once to record; a replay counts as a single launch, and its results come in the tensors of the recording.

    Copies to or from the host cannot be recorded, as on most devices.
    """
    index = STATE.index_of(device)
    STATE.fire("hook.capture", index)
    before = STATE.crossings()
    recorded = function(*example)
    if STATE.crossings() != before:
        raise NotImplementedError(f"something is copied between {NAME} and the host in it")

    def replay() -> Any:
        STATE.fire("hook.replay", index)
        STATE.launched("hook.replay")
        STATE.local.replaying = True
        try:
            fresh = function(*example)
        finally:
            STATE.local.replaying = False
        for old, new in zip(pytree.tree_leaves(recorded), pytree.tree_leaves(fresh), strict=True):
            if isinstance(old, torch.Tensor):
                kernels.raw(old).copy_(kernels.raw(new))
        return recorded

    return replay


@hookimpl
def collective_backend() -> str:
    """torch runs gloo for this device through the host."""
    return "gloo"


@hookimpl
def allocate_kv(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, layout: str, device: str
) -> KVCache:
    """Filled with NaN, so that reading what was never written shows."""
    index = STATE.index_of(device)
    STATE.fire("hook.allocate_kv", index)
    STATE.launched("hook.allocate_kv")
    facts = profile(STATE.chip).capabilities
    if layout not in facts.kv_layouts or (facts.block_sizes and block_size not in facts.block_sizes):
        raise ValueError(f"chip {STATE.chip} has no {layout} cache with blocks of {block_size}")
    inner = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
    shape = (num_blocks, *inner, head_dim)
    key, value = (torch.empty(shape, dtype=dtype, device=f"{NAME}:{index}") for _ in range(2))
    return KVCache(key, value, block_size, layout)


@hookimpl
def copy_blocks(cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """One kernel for both halves."""
    kernels.launch("copy_blocks", cache.key, cache.value, source, target)
    for part in (cache.key, cache.value):
        payload = kernels.raw(part)
        payload[kernels.raw(target)] = payload[kernels.raw(source)]


@hookimpl
def swap_blocks(source_cache: KVCache, target_cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """Two real copies, one for keys and one for values, whichever side is the host."""
    pairs = ((source_cache.key, target_cache.key), (source_cache.value, target_cache.value))
    on_device = [t for pair in pairs for t in pair if t.device.type == NAME]
    kernels.launch("swap_blocks", *on_device)
    for from_part, to_part in pairs:
        from_host, to_host = (p.device.type != NAME for p in (from_part, to_part))
        blocks = (from_part if from_host else kernels.raw(from_part))[source]
        if from_host != to_host:
            kind = "h2d" if from_host else "d2h"
            index = STATE.index_of(to_part.device if from_host else from_part.device)
            STATE.fire(f"copy.{kind}", index)
            STATE.moved(kind, blocks)
        (to_part if to_host else kernels.raw(to_part))[target] = blocks


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What ``prepare_attention`` saw, so that a plan left over from another step is noticed."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_size: int


@hookimpl
def prepare_attention(
    metadata: AttentionMetadata, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> StepPlan:
    """Host work only, as on most devices."""
    kernels.launch("prepare_attention", metadata.block_tables)
    return StepPlan(metadata.query_lens, metadata.kv_lens, block_size)


@hookimpl
def write_kv(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Scatter into both halves."""
    kernels.launch("write_kv", key, value, cache.key, cache.value, slot_mapping)
    slots = kernels.raw(slot_mapping)
    for part, new in ((cache.key, key), (cache.value, value)):
        kernels.store(kernels.raw(part), cache.layout, kernels.raw(new), slots)


def _attention(
    hook: str, query: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, options: tuple[float, int, float]
) -> torch.Tensor:
    tensors = (query, cache.key, cache.value, metadata.block_tables, metadata.query_start, metadata.seq_lens)
    index = kernels.launch(hook, *tensors)
    seen = (metadata.query_lens, metadata.kv_lens, cache.block_size)
    if metadata.plan is not None and metadata.plan != StepPlan(*seen):
        raise RuntimeError("attention got the plan of another step")
    rows, tables = kernels.raw(query), kernels.raw(metadata.block_tables)
    starts, lengths = kernels.raw(metadata.query_start).tolist(), kernels.raw(metadata.seq_lens).tolist()
    out = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    for i, length in enumerate(lengths):
        span = slice(starts[i], starts[i + 1])
        if starts[i + 1] > starts[i]:
            key, value = (
                kernels.context(kernels.raw(p), cache.layout, tables[i], length) for p in (cache.key, cache.value)
            )
            out[span] = kernels.attend(rows[span], key, value, *options)
    return kernels.result(hook, out, index)


@hookimpl
def attention(
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """Sequence by sequence."""
    return _attention("attention", query, cache, metadata, (scale, sliding_window, soft_cap))


@hookimpl
def decode_attention(
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """As ``attention``; refuses a batch that is not all decodes."""
    if not metadata.decode_only:
        raise RuntimeError("decode_attention got a batch with a prefill in it")
    return _attention("decode_attention", query, cache, metadata, (scale, sliding_window, soft_cap))


@hookimpl
def pack_weight(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
    """Dense weights are kept transposed, which no other plugin could read by chance; the rest as they come."""
    index = STATE.index_of(device)
    STATE.fire("hook.pack_weight", index)
    if scheme not in profile(STATE.chip).capabilities.schemes:
        raise ValueError(f"chip {STATE.chip} has no weight scheme {scheme!r}")
    data = {k: v.T.contiguous() if scheme == "dense" and k == "weight" else v for k, v in tensors.items()}
    return PackedWeight(scheme, info, {k: v.to(f"{NAME}:{index}") for k, v in data.items()})


@hookimpl
def restore_weight(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
    """Refuses what ``pack_weight`` did not make."""
    index = STATE.index_of(device)
    STATE.fire("hook.restore_weight", index)
    weight, columns = tensors.get("weight"), 1 if scheme == "dense" else 0
    if weight is None or weight.dim() != 2 or weight.shape[columns] != info.out_features:
        raise ValueError(f"{info.name}: these tensors are no packed weight of {info.out_features} outputs")
    return PackedWeight(scheme, info, {k: v.to(f"{NAME}:{index}") for k, v in tensors.items()})


@hookimpl
def matmul(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """One kernel, dequantizing on the way."""
    index = kernels.launch("matmul", x, bias, *weight.data.values())
    data = {k: kernels.raw(v) for k, v in weight.data.items()}
    payload = None if bias is None else kernels.raw(bias)
    out = kernels.product(weight.scheme, kernels.raw(x), data, weight.info.group_size, payload)
    return kernels.result("matmul", out, index)


@hookimpl
def expert_matmul(x: torch.Tensor, weights: Sequence[PackedWeight], experts: torch.Tensor) -> torch.Tensor:
    """One kernel, row by row."""
    index = kernels.launch("expert_matmul", x, experts, *(t for weight in weights for t in weight.data.values()))
    payload, out = kernels.raw(x), []
    for row, expert in enumerate(kernels.raw(experts).tolist()):
        weight = weights[expert]
        data = {k: kernels.raw(v) for k, v in weight.data.items()}
        out.append(kernels.product(weight.scheme, payload[row : row + 1], data, weight.info.group_size, None))
    return kernels.result("expert_matmul", torch.cat(out), index)


@hookimpl
def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Row by row."""
    settings = (params.temperature, params.top_k, params.top_p, params.min_p, params.uniform)
    index = kernels.launch("sample", logits, *settings)
    columns = zip(*(kernels.raw(s).tolist() for s in settings), strict=True)
    tokens = [kernels.draw(row, *column) for row, column in zip(kernels.raw(logits), columns, strict=True)]
    return kernels.result("sample", torch.tensor(tokens, dtype=torch.int64), index)


@hookimpl
def apply_penalties(logits: torch.Tensor, params: PenaltyTensors) -> torch.Tensor:
    """The contract's sequence, on the payloads, as one kernel."""
    parts = (params.prompt_ids, params.output_ids, params.presence, params.frequency, params.repetition)
    kernels.launch("apply_penalties", logits, *parts)
    composites.apply_penalties(kernels.raw(logits), PenaltyTensors(*map(kernels.raw, parts)))
    return logits


@hookimpl
def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> LogprobOutput:
    """The contract's sequence, on the payloads, as one kernel."""
    index = kernels.launch("logprobs", logits, token_ids)
    out = composites.logprobs(kernels.raw(logits), kernels.raw(token_ids), top)
    fields = (out.chosen, out.rank, out.top_ids, out.top_values)
    return LogprobOutput(*(kernels.result("logprobs", x, index) for x in fields))


def without(*hooks: str) -> ModuleType:
    """This plugin as a module that lacks ``hooks``: a vendor who has not written them yet."""
    module = ModuleType(__name__)
    module.__dict__.update({k: v for k, v in globals().items() if k in CATALOG and k not in hooks})
    return module


def _left_out(environment: Mapping[str, str]) -> tuple[str, ...]:
    named = [x.strip() for x in environment.get("QIAO_SIM_DROP", "").split(",") if x.strip()]
    return (*named, *profile(environment.get("QIAO_SIM_CHIP", "")).missing)


for _name in _left_out(os.environ):
    # what is not there cannot be found: the registry sees the same module that a vendor would have shipped
    globals().pop(_name, None)
