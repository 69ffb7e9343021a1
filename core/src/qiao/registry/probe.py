"""The start-up probe: each bound operator is called once on a tiny case, so that declared support is confirmed.

An operator that raises here, or returns something else than the contract says (kind, shape, dtype, device), leads to
a new plan before anything is served, and the policy applies to that one. After the start nothing is moved any more: an
operator that raises then fails its request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from qiao.contract import (
    AttentionMetadata,
    AttentionShape,
    KVCache,
    LogprobOutput,
    MemoryInfo,
    PackedWeight,
    PenaltyTensors,
    SamplingTensors,
    WeightInfo,
)
from qiao.errors import PluginError
from qiao.optable import OpTable
from qiao.registry.backend import Backend
from qiao.registry.binder import bind
from qiao.registry.fallback import FallbackCounters
from qiao.registry.placement import Kind
from qiao.registry.plan import Plan, make_plan

_FEATURES = 64
_GROUP = 32
_TOKENS = 3
_VOCABULARY = 32
_EXPERTS = 4

Call = tuple[str, Callable[[], Any]]
_Record = TypeVar("_Record")


@dataclass(slots=True)
class _State:
    """What one probed operator makes for the next, as at run time."""

    cache: KVCache | None = None
    weight: PackedWeight | None = None
    plan: Any = None


def confirm(plan: Plan, backend: Backend, counters: FallbackCounters) -> tuple[Plan, OpTable]:
    """Bind ``plan``, probe it, and plan again without what raised, until every bound operator works.

    Returns the plan that holds and its table; the probe's own copies are not counted. Raises ``PluginError`` where the
    operator that raised has no other place, and ``torch.OutOfMemoryError`` as it comes.
    """
    _check_device(backend)
    while True:
        raised = probe_operators(bind(plan, backend, FallbackCounters()), plan)
        if not raised:
            return plan, bind(plan, backend, counters)
        for operator, reason in raised.items():
            placed = [p for p in plan.placements if p.operator == operator]
            if any(p.kind in (Kind.HOST, Kind.COMPOSITE) for p in placed) or not placed:
                where = placed[0].place if placed else backend.plugin
                raise PluginError(
                    f"cannot start on {plan.device}: {operator} of {where} {reason}; it has no other place"
                )
        plan = make_plan(
            plan.shape,
            backend,
            plan.policy,
            drop=plan.drop,
            block_size=plan.block_size,
            step=plan.step,
            rates=plan.rates,
            failed={**plan.failed, **raised},
        )


def _check_device(backend: Backend) -> None:
    """Ask the hooks without which nothing runs. Raises ``PluginError``."""
    device = backend.device.torch_device
    try:
        found = _is_a(MemoryInfo, backend.hooks["memory_info"](device))
        if not 0 <= found.free <= found.total:
            raise ValueError(f"returned {found.free} free bytes of {found.total}")
    except Exception as error:
        raise PluginError(_unusable(backend, "memory_info", error)) from error
    try:
        backend.hooks["synchronize"](device)
    except Exception as error:
        raise PluginError(_unusable(backend, "synchronize", error)) from error


def _unusable(backend: Backend, hook: str, error: Exception) -> str:
    return f"cannot start on {backend.device.name}: {hook} of {backend.plugin} failed: {type(error).__name__}: {error}"


def probe_operators(table: OpTable, plan: Plan) -> dict[str, str]:
    """Call each operator of ``table`` that the model uses once and wait; returns what each failing one raised.

    Operators that need what a failing one makes (a cache, a packed weight) are left to the next round.
    """
    raised: dict[str, str] = {}
    for calls in _families(table, plan):
        for operator, call in calls:
            try:
                call()
                table.synchronize(table.device)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                cause = error.__cause__ or error
                raised[operator] = f"probe raised {type(cause).__name__}: {cause}"
                break
    return raised


def _families(table: OpTable, plan: Plan) -> Iterator[Iterator[Call]]:
    dtype = getattr(torch, plan.shape.dtype)
    for shape in dict.fromkeys(replace(a, count=1) for a in plan.shape.attention):
        for decode in (False, True):
            yield _attention_calls(table, plan, shape, dtype, decode)
        yield iter([_rope_write_call(table, plan, shape, dtype)])
    for scheme in plan.shape.schemes:
        yield _matmul_calls(table, scheme, dtype, experts=plan.shape.experts_per_token > 0)
    yield from (iter([call]) for call in (*_sampling_calls(table), *_light_calls(table, plan, dtype)))


def _metadata(device: str, decode: bool, block_size: int) -> AttentionMetadata:
    """One sequence that starts in block 1; a decode step has all but its last token in the cache."""
    new = 1 if decode else _TOKENS
    first = _TOKENS - new
    return AttentionMetadata(
        query_start=torch.tensor([0, new], dtype=torch.int32).to(device),
        seq_lens=torch.tensor([_TOKENS], dtype=torch.int32).to(device),
        block_tables=torch.arange(1, _blocks(block_size), dtype=torch.int32)[None].to(device),
        slot_mapping=(torch.arange(first, _TOKENS) + block_size).to(device),
        query_lens=(new,),
        kv_lens=(_TOKENS,),
    )


def _blocks(block_size: int) -> int:
    """Blocks of a probe's cache: one that stays empty, and those of the sequence."""
    return 1 + -(-_TOKENS // block_size)


def _new_cache(table: OpTable, plan: Plan, shape: AttentionShape) -> KVCache:
    sizes = (_blocks(plan.block_size), plan.block_size, shape.num_kv_heads, shape.head_dim)
    return table.allocate_kv(*sizes, getattr(torch, plan.shape.cache_dtype), table.kv_layout, table.kv_device)


def _slots(plan: Plan, device: str) -> torch.Tensor:
    return (torch.arange(_TOKENS) + plan.block_size).to(device)


def _attention_calls(
    table: OpTable, plan: Plan, shape: AttentionShape, dtype: torch.dtype, decode: bool
) -> Iterator[Call]:
    state, tokens = _State(), 1 if decode else _TOKENS
    heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_dim
    attend = table.decode_attention if decode else table.attention
    if attend is None:
        return
    options = (size**-0.5, shape.sliding_window, shape.soft_cap)

    def allocate() -> None:
        cache = _is_a(KVCache, _new_cache(table, plan, shape))
        if (cache.layout, cache.block_size) != (table.kv_layout, plan.block_size):
            raise TypeError(
                f"returned layout {cache.layout} and blocks of {cache.block_size}, "
                f"asked for were {table.kv_layout} and {plan.block_size}"
            )
        state.cache = cache

    def write() -> None:
        assert state.cache is not None  # the call before made it
        key = _ones((_TOKENS, kv_heads, size), dtype, table.device)
        table.write_kv(key, key, state.cache, _slots(plan, table.kv_device))

    def prepare() -> None:
        if table.prepare_attention is not None:
            metadata = _metadata(table.kv_device, decode, plan.block_size)
            state.plan = table.prepare_attention(metadata, heads, kv_heads, size, plan.block_size)

    def read() -> None:
        metadata = replace(_metadata(table.kv_device, decode, plan.block_size), plan=state.plan)
        query = _ones((tokens, heads, size), dtype, table.device)
        _like(query, attend(query, state.cache, metadata, *options))

    def copy() -> None:
        assert state.cache is not None  # the first call made it
        source, target = (torch.tensor([i]).to(table.kv_device) for i in (1, 0))
        table.copy_blocks(state.cache, source, target)

    yield "allocate_kv", allocate
    yield "write_kv", write
    yield "prepare_attention", prepare
    yield ("decode_attention" if decode else "attention"), read
    yield "copy_blocks", copy


def _rope_write_call(table: OpTable, plan: Plan, shape: AttentionShape, dtype: torch.dtype) -> Call:
    def call() -> None:
        if table.rope_write_kv is None:
            return
        cache = _new_cache(table, plan, shape)
        query, key = (_ones((_TOKENS, n, shape.head_dim), dtype, table.device) for n in _heads(shape))
        turn = _ones((_TOKENS, shape.head_dim // 2), torch.float32, table.device)
        slots = _slots(plan, table.kv_device)
        _like(query, table.rope_write_kv(query, key, key.clone(), turn, turn, False, cache, slots))

    return "rope_write_kv", call


def _heads(shape: AttentionShape) -> tuple[int, int]:
    return shape.num_heads, shape.num_kv_heads


def _matmul_calls(table: OpTable, scheme: str, dtype: torch.dtype, experts: bool) -> Iterator[Call]:
    state, ops = _State(), table.matmul[scheme]
    bits = {"w4a16": 4, "dense": 16}.get(scheme, 8)
    grouped = _GROUP if scheme in ("w4a16", "w8a16") else -1
    info = WeightInfo("probe", _FEATURES, _FEATURES, bits, grouped)

    def pack() -> None:
        state.weight = _is_a(PackedWeight, ops.pack_weight(scheme, _weight(scheme, dtype), info, ops.device))

    def product() -> None:
        assert state.weight is not None  # the call before made it
        x = _ones((_TOKENS, _FEATURES), dtype, table.device)
        _like(x, ops.matmul(x, state.weight, None))

    def chosen() -> None:
        if ops.expert_matmul is None:
            return
        assert state.weight is not None  # the call before made it
        x = _ones((_TOKENS, _FEATURES), dtype, table.device)
        choice = torch.arange(_TOKENS).remainder(2).to(ops.device)
        _like(x, ops.expert_matmul(x, (state.weight, state.weight), choice))

    yield "pack_weight", pack
    yield "matmul", product
    if experts:
        yield "expert_matmul", chosen


def _weight(scheme: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A small weight as the contract hands it over for ``scheme``; see ``qiao.contract.matmul``."""
    shape = (_FEATURES, _FEATURES)
    if scheme == "dense":
        return {"weight": torch.ones(shape, dtype=dtype)}
    if scheme == "fp8":
        return {"weight": torch.ones(shape).to(torch.float8_e4m3fn), "scale": torch.ones(_FEATURES, 1)}
    groups = 1 if scheme == "w8a8" else _FEATURES // _GROUP
    scale = torch.full((_FEATURES, groups), 0.1, dtype=dtype)
    if scheme == "w4a16":
        weight = torch.full(shape, 9, dtype=torch.uint8)
        return {"weight": weight, "scale": scale, "zero": torch.full((_FEATURES, groups), 8.0, dtype=dtype)}
    return {"weight": torch.ones(shape, dtype=torch.int8), "scale": scale}


def _sampling_calls(table: OpTable) -> list[Call]:
    device = table.sample_device
    rows = 2

    def logits() -> torch.Tensor:
        ramp = torch.arange(rows * _VOCABULARY, dtype=torch.float32).view(rows, _VOCABULARY)
        return table.stage_logits(ramp.to(table.device))

    def numbers(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype).to(device)

    def sample() -> None:
        settings = (numbers(0.7), numbers(5, torch.int32), numbers(0.9), numbers(0.01), numbers(0.5))
        ids = torch.zeros(rows, dtype=torch.int64).to(device)
        _like(ids, table.sample(logits(), SamplingTensors(*settings, False, True, True, True)))

    def penalise() -> None:
        ids = torch.zeros((rows, 1), dtype=torch.int64).to(device)
        given = logits()
        _like(given, table.apply_penalties(given, PenaltyTensors(ids, ids, numbers(0.5), numbers(0.5), numbers(1.1))))

    def score() -> None:
        ids = torch.zeros(rows, dtype=torch.int64).to(device)
        found = _is_a(LogprobOutput, table.logprobs(logits(), ids, 2))
        _like(ids, found.rank)
        _like(ids.float(), found.chosen)
        _like(ids[:, None].expand(rows, 2), found.top_ids)
        _like(ids[:, None].expand(rows, 2).float(), found.top_values)

    return [("sample", sample), ("apply_penalties", penalise), ("logprobs", score)]


def _light_calls(table: OpTable, plan: Plan, dtype: torch.dtype) -> list[Call]:
    attention, device = plan.shape.attention[0], table.device

    def rows(width: int) -> torch.Tensor:
        return _ones((_TOKENS, width), dtype, device)

    def rotate() -> None:
        query, key = (_ones((_TOKENS, n, attention.head_dim), dtype, device) for n in _heads(attention))
        turn = _ones((_TOKENS, attention.head_dim // 2), torch.float32, device)
        _pair(query, key, table.rotary(query, key, turn, turn, False))

    def add_norm() -> None:
        x, weight = rows(_FEATURES), _ones((_FEATURES,), dtype, device)
        _pair(x, x, table.add_rms_norm(rows(_FEATURES), rows(_FEATURES), weight, 1e-6))

    def norm() -> None:
        x = rows(_FEATURES)
        _like(x, table.rms_norm(x, _ones((_FEATURES,), dtype, device), 1e-6))

    def cap() -> None:
        logits = _ones((_TOKENS, _VOCABULARY), torch.float32, device)
        _like(logits, table.cap_logits(_ones((_TOKENS, _VOCABULARY), torch.float32, device), 30.0))

    def route() -> None:
        logits = rows(_EXPERTS)
        wanted = logits[:, :2], torch.zeros((_TOKENS, 2), dtype=torch.int64).to(device)
        _pair(*wanted, table.route_experts(logits, 2, True))

    def combine() -> None:
        x = _ones((_TOKENS, 2, _FEATURES), dtype, device)
        _like(x[:, 0], table.combine_experts(x, rows(2)))

    calls: dict[str, Callable[[], Any]] = {
        "rms_norm": norm,
        "add_rms_norm": add_norm,
        "rotary": rotate,
        "silu_mul": lambda: _like(rows(_FEATURES // 2), table.silu_mul(rows(_FEATURES))),
        "gelu_mul": lambda: _like(rows(_FEATURES // 2), table.gelu_mul(rows(_FEATURES))),
        "cap_logits": cap,
        "route_experts": route,
        "combine_experts": combine,
    }
    used = dict(plan.shape.fused_calls)
    return [(name, call) for name, call in calls.items() if not used or used.get(name)]


def _ones(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype).to(device)


def _is_a(kind: type[_Record], result: object) -> _Record:
    """``result``, where it is of ``kind``."""
    if not isinstance(result, kind):
        raise TypeError(f"returned {_described(result)}, the contract asks for {kind.__name__}")
    return result


def _like(wanted: torch.Tensor, result: object) -> None:
    """Refuse what is no tensor of the shape, dtype and device of ``wanted``."""
    if isinstance(result, torch.Tensor):
        facts = ("shape", "dtype", "device")
        if all(getattr(result, fact) == getattr(wanted, fact) for fact in facts):
            return
    raise TypeError(f"returned {_described(result)}, the contract asks for {_described(wanted)}")


def _pair(first: torch.Tensor, second: torch.Tensor, result: object) -> None:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"returned {_described(result)}, the contract asks for two tensors")
    _like(first, result[0])
    _like(second, result[1])


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')} on {value.device}"
    return f"a {type(value).__name__}" if value is not None else "nothing"
