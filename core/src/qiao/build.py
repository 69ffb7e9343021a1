"""The composition root: from what the user set to a running engine. What can be refused is refused before weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from qiao.config import EngineArgs, dtype_name
from qiao.contract import Capabilities, ModelShape
from qiao.devices import HOST
from qiao.engine import Engine, EngineConfig
from qiao.engine.memory import KVSize, gib, memory_limit, size_kv
from qiao.engine.request import EngineInfo, FallbackCount
from qiao.errors import ModelError, ParameterError
from qiao.loading import (
    ModelFiles,
    eos_token_ids,
    iter_weights,
    load_config,
    quantization_of,
    quantized_weights,
    resolve,
)
from qiao.loading.heap import freed_at_once
from qiao.models import create, describe
from qiao.models.base import Model
from qiao.optable import OpTable
from qiao.quantization import QuantizedWeight
from qiao.registry import (
    Backend,
    FallbackCounters,
    Plan,
    Policy,
    choose,
    confirm,
    enforce,
    make_plan,
)

logger = logging.getLogger(__name__)

_NONE: Mapping[str, QuantizedWeight] = MappingProxyType({})
HOST_SHARE = 0.25
DEVICE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine ready to step, what a front end must know of it, and where its operators run."""

    engine: Engine
    info: EngineInfo
    plan: Plan


def build_engine(args: EngineArgs) -> BuiltEngine:
    """Choose a device, plan, bind, load weights, size the cache, and return an engine.

    Raises ``UsageError`` for a wrong argument or model, ``PluginError`` where the device cannot be used,
    ``PlanRefusedError`` where the fallback policy forbids the plan; all before weights are read.
    """
    backend = choose(args.device)
    set_threads(backend, args.threads)
    files = resolve(args.model, args.revision, args.download_dir)
    _check_format(args, files)
    config = load_config(files, args.trust_remote_code, args.hf_overrides)
    quantized = {} if args.quantization == "none" else quantized_weights(files)
    shape = shape_for(config, args.dtype, backend.capabilities, quantized)
    if args.kv_cache_dtype != "auto":
        shape = replace(shape, kv_dtype=args.kv_cache_dtype)
    wanted = _context(args, shape)
    counters = FallbackCounters()
    plan, ops = place(shape, backend, args, counters)
    model, seconds = _load(files, config, shape, ops, args, quantized)
    logger.info("weights of %s loaded in %.1f s", args.model, seconds)
    kv_dtype = dtype_of(shape.cache_dtype)
    size = _size_cache(args, shape, plan, ops, wanted, kv_dtype)
    logger.info(size.explanation)
    max_model_len = _fit_context(wanted, size, plan.block_size)
    engine = Engine(model, ops, _engine_config(args, shape, plan, size, max_model_len, kv_dtype), _counts(counters))
    info = EngineInfo(
        device=plan.device,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        block_size=plan.block_size,
        num_blocks=size.num_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_queued=args.max_num_queued_reqs,
        dtype=shape.dtype,
        kv_cache_dtype=shape.cache_dtype,
        eos_token_ids=eos_token_ids(getattr(config.get_text_config(), "eos_token_id", None)),
        kv_explanation=size.explanation,
        plan=plan.as_dict(),
    )
    return BuiltEngine(engine, info, plan)


def set_threads(backend: Backend, count: int | None) -> None:
    """Tell the device's plugin and the CPU plugins behind it how many threads to use, None for their own choice.

    Raises ``ParameterError`` where a plugin refuses the number.
    """
    for one in (backend, *backend.hosts):
        hook = one.hooks.get("set_threads")
        if hook is None:
            continue
        try:
            logger.info("%s: %s", one.plugin, hook(count))
        except ValueError as error:
            raise ParameterError("threads", str(error)) from error


def place(shape: ModelShape, backend: Backend, args: EngineArgs, counters: FallbackCounters) -> tuple[Plan, OpTable]:
    """Plan, ask the policy, bind, and confirm each bound operator with one call.

    An operator that raises in that call counts as lacking, and plan and policy are asked once more, so that support is
    settled at start and never by catching an error in a step. Raises ``PlanRefusedError`` and ``PluginError``.
    """
    policy = Policy.parse(args.fallback, args.fallback_budget)
    plan = make_plan(shape, backend, policy, drop=args.drop, block_size=args.block_size)
    enforce(plan, policy)
    confirmed, ops = confirm(plan, backend, counters)
    if confirmed is not plan:
        enforce(confirmed, policy)
    return confirmed, ops


def shape_for(
    config: Any, dtype: str, capabilities: Capabilities, quantized: Mapping[str, QuantizedWeight] = _NONE
) -> ModelShape:
    """The model's shape with the dtype that it will run in.

    ``auto`` keeps the checkpoint's dtype where the chip has it, else takes the chip's first.
    The KV cache of a quantized model that runs in float32 is float16 where the device has it: half the memory and the
    reading, for an error far below that of the weights. Raises ``ParameterError`` for a dtype that the chip lacks.
    """
    shape = describe(config, quantized)
    name = dtype_name(dtype)
    if name == "auto":
        name = shape.dtype if shape.dtype in capabilities.dtypes else capabilities.dtypes[0]
        if name != shape.dtype:
            logger.warning("the device has no %s; the model runs in %s", shape.dtype, name)
    elif name not in capabilities.dtypes:
        raise ParameterError(
            "dtype", f"{name} is not supported by this device; it has {', '.join(capabilities.dtypes)}"
        )
    shrinks = bool(quantized) and name == "float32" and "float16" in capabilities.kv_dtypes
    return replace(shape, dtype=name, kv_dtype="float16" if shrinks else shape.kv_dtype)


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called ``name``. Raises ``ModelError`` where there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"dtype {name!r} of the model's config is not one of torch's; set --dtype float32")
    return found


def _check_format(args: EngineArgs, files: ModelFiles) -> None:
    """Refuse a format or a quantization that the user names and the files do not have."""
    found = "gguf" if files.gguf else "safetensors"
    if args.load_format not in ("auto", found):
        raise ParameterError(
            "load_format", f"{args.load_format!r} was asked for, but {files.name} is {found}; leave it out"
        )
    method = quantization_of(files)
    if args.quantization not in (None, "none", method):
        raise ParameterError(
            "quantization",
            f"{args.quantization!r} was asked for, but {files.name} is {method or 'not quantized'}; leave it out, or "
            "set none to dequantize at load",
        )


def _load(
    files: ModelFiles,
    config: Any,
    shape: ModelShape,
    ops: OpTable,
    args: EngineArgs,
    quantized: Mapping[str, QuantizedWeight],
) -> tuple[Model, float]:
    start = time.monotonic()
    with freed_at_once():
        model = create(config, ops, dtype_of(shape.dtype), args.max_model_len, quantized)
        model.load(iter_weights(files, dequantize=args.quantization == "none"))
        ops.synchronize(ops.device)
    return model, time.monotonic() - start


def _context(args: EngineArgs, shape: ModelShape) -> int:
    """The context in tokens that the user asked for, or the model's own."""
    if args.max_model_len is None:
        return shape.max_position
    if args.max_model_len > shape.max_position:
        raise ParameterError(
            "max_model_len",
            f"{args.max_model_len} is more than the {shape.max_position} positions that the model knows; lower it, or "
            "extend the rope with --hf-overrides",
        )
    return args.max_model_len


def _size_cache(
    args: EngineArgs, shape: ModelShape, plan: Plan, ops: OpTable, context: int, dtype: torch.dtype
) -> KVSize:
    total, free, source, share = _memory(args, ops)
    return size_kv(
        shape,
        total=total,
        free=free,
        source=source,
        utilization=share,
        reserve=_activation_bytes(args, shape, dtype) if ops.kv_device == ops.device else 0,
        block_size=plan.block_size,
        element_size=dtype.itemsize,
        max_model_len=context,
        max_num_seqs=args.max_num_seqs,
        kv_bytes=args.kv_cache_memory_bytes,
        num_blocks=args.num_gpu_blocks_override,
    )


def _memory(args: EngineArgs, ops: OpTable) -> tuple[int, int, str, float]:
    """Total and free bytes where the cache lies, their source, and the share of the total that may be in use."""
    share = args.gpu_memory_utilization
    if ops.kv_device != HOST:
        found = ops.memory_info(ops.kv_device)
        source = f"{ops.kv_device}: {gib(found.total)}, of which {gib(found.free)} free"
        return found.total, found.free, source, DEVICE_SHARE if share is None else share
    limit = memory_limit()
    if share is None:  # a share of what is free, since other programs live on the host too
        return limit.free, limit.free, limit.explanation, HOST_SHARE
    return limit.bytes, limit.free, limit.explanation, share


def _activation_bytes(args: EngineArgs, shape: ModelShape, dtype: torch.dtype) -> int:
    """An upper estimate of one step's working memory in bytes: the widest layer, and the float32 logits twice."""
    widest = max(x.in_features + 2 * x.out_features for x in shape.linears if x.rows != "N")
    tokens, rows = args.max_num_batched_tokens, min(args.max_num_seqs, args.max_num_batched_tokens)
    return 2 * tokens * (widest + 4 * shape.hidden_size) * dtype.itemsize + 2 * rows * shape.vocab_size * 4


def _fit_context(context: int, size: KVSize, block_size: int) -> int:
    holds = size.num_blocks * block_size
    if context > holds:
        logger.warning(
            "the KV cache holds %d tokens, so the context is %d instead of %d; longer requests are refused at once",
            holds,
            holds,
            context,
        )
    return min(context, holds)


def _engine_config(
    args: EngineArgs, shape: ModelShape, plan: Plan, size: KVSize, max_model_len: int, dtype: torch.dtype
) -> EngineConfig:
    return EngineConfig(
        num_blocks=size.num_blocks,
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        block_size=plan.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        dtype=dtype,
        enable_prefix_caching=args.enable_prefix_caching,
        enable_chunked_prefill=args.enable_chunked_prefill,
        scheduling_policy=args.scheduling_policy,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        tpot_target=None if args.tpot_target_ms is None else args.tpot_target_ms / 1000.0,
        max_num_queued=args.max_num_queued_reqs,
        seed=args.seed,
        check_integrity=args.check_integrity,
        enforce_eager=args.enforce_eager,
    )


def _counts(counters: FallbackCounters) -> Callable[[], Sequence[FallbackCount]]:
    def counts() -> Sequence[FallbackCount]:
        return [
            FallbackCount(r.operator, r.calls, r.bytes_to_host, r.bytes_to_device, r.seconds)
            for r in counters.snapshot()
        ]

    return counts
