"""The composition root: from what the user set to a running engine. What can be refused is refused before weights."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from qiao.config import EngineArgs, SpeculativeConfig
from qiao.contract import ModelShape
from qiao.devices import HOST
from qiao.engine import Engine, EngineConfig
from qiao.engine.adapters import load_adapters
from qiao.engine.drafting import DraftParts
from qiao.engine.grammars import Vocabulary
from qiao.engine.memory import KVSize, gib, memory_limit, size_kv
from qiao.engine.request import EngineInfo, FallbackCount
from qiao.engine.tiers import OffloadSizes, private_folder
from qiao.errors import ModelError, ParameterError
from qiao.loading import (
    ModelFiles,
    config_file,
    eos_token_ids,
    iter_weights,
    load_config,
    plain_config,
    quantization_of,
    quantized_weights,
    resolve,
)
from qiao.loading.heap import freed_at_once
from qiao.loading.packed_cache import PackedCache, cache_folder, code_identity, source_identity
from qiao.loading.weights import weight_files
from qiao.models import create, has_family
from qiao.models.adapters import adapter_bytes, with_adapters
from qiao.models.base import Model
from qiao.models.packing import load_kept
from qiao.models.placing import Quantized, keep_quantized, shape_for
from qiao.models.settings import Settings
from qiao.optable import OpTable
from qiao.quantization import Weight
from qiao.registry import (
    Backend,
    FallbackCounters,
    Plan,
    Policy,
    choose,
    confirm,
    enforce,
    make_plan,
    to_dequantize,
)
from qiao.registry.pricing import weight_bytes

logger = logging.getLogger(__name__)

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
    counters = FallbackCounters()
    placed = _place_model(args, backend, counters)
    shape, plan, ops = placed.shape, placed.plan, placed.ops
    wanted = _context(args, shape)
    draft = _place_draft(args, backend, counters, placed, wanted)
    others = _used_by_others(args, ops)
    model = _load(placed, backend)
    parts = None if draft is None else DraftParts(_load(draft, backend), draft.ops, dtype_of(draft.shape.cache_dtype))
    kv_dtype = dtype_of(shape.cache_dtype)
    size = _size_cache(placed, draft, wanted, others)
    logger.info(size.explanation)
    adapters = load_adapters(args, model, ops)  # after the sizes, which leave room for them
    max_model_len = _fit_context(wanted, size, plan.block_size)
    settings = _engine_config(args, shape, plan, size, max_model_len, kv_dtype)
    settings = replace(settings, kv_offloading=_offloading(placed, draft, backend))
    ends = eos_token_ids(_end_of(placed.config))
    vocabulary = partial(read_vocabulary, args, shape.vocab_size, ends)
    engine = Engine(model, ops, settings, _counts(counters), vocabulary=vocabulary, draft=parts, adapters=adapters)
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
        eos_token_ids=ends,
        kv_explanation=size.explanation,
        kv_block_bytes=size.block_bytes,
        plan=plan.as_dict(),
    )
    return BuiltEngine(engine, info, plan)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A model whose operators are bound and whose weights have not been read.

    ``dequantized``: schemes that become floating point at load, or whether all do.
    """

    args: EngineArgs
    files: ModelFiles
    config: Any
    quantized: Quantized
    dequantized: bool | AbstractSet[str]
    shape: ModelShape
    plan: Plan
    ops: OpTable


def _place_model(args: EngineArgs, backend: Backend, counters: FallbackCounters) -> _Placed:
    files = resolve(args.model, args.revision, args.download_dir)
    _check_format(args, files)
    config = read_config(files, args)
    none = args.quantization == "none"
    policy = Policy.parse(args.fallback, args.fallback_budget)

    def ask(quantized: Quantized) -> tuple[ModelShape, frozenset[str]]:
        shape = shape_for(config, args.dtype, backend.capabilities, quantized)
        if args.kv_cache_dtype != "auto":
            shape = replace(shape, kv_dtype=args.kv_cache_dtype)
        if args.enable_lora:
            shape = with_adapters(shape, args.max_loras, args.max_lora_rank)
        plan = make_plan(shape, backend, policy, drop=args.drop, block_size=args.block_size)
        return shape, to_dequantize(plan, policy)

    quantized, lost, shape = keep_quantized({} if none else quantized_weights(files), ask)
    plan, ops = place(shape, backend, args, counters)
    return _Placed(args, files, config, quantized, none or lost, shape, plan, ops)


def _place_draft(
    args: EngineArgs, backend: Backend, counters: FallbackCounters, main: _Placed, context: int
) -> _Placed | None:
    """The draft model, with the blocks and the context of the ``main`` one; None where there is none.

    Raises ``ParameterError`` where the vocabularies differ.
    """
    speculation = args.speculation
    if speculation is None or speculation.method != "draft_model":
        return None
    own = replace(
        args,
        model=speculation.model,
        revision=speculation.revision,
        tokenizer=None,
        tokenizer_revision=None,
        load_format="auto",
        quantization=None,
        hf_overrides={},
        enable_lora=False,
        lora_modules=(),
        max_model_len=context,
        block_size=main.plan.block_size,
    )
    draft = _place_model(own, backend, counters)
    if draft.shape.vocab_size != main.shape.vocab_size:
        raise ParameterError(
            "speculative_config",
            f"the draft model {own.model} has a vocabulary of {draft.shape.vocab_size}, the model one of "
            f"{main.shape.vocab_size}; take a model of the same family",
        )
    return draft


def read_vocabulary(args: EngineArgs, vocab_size: int, ends: Sequence[int]) -> Vocabulary:
    """The bytes of the model's tokens, for grammars: read once, when the first answer must follow one.

    ``ends`` are the end tokens of the model's config; those of its other files are added as the front end does it.
    """
    from qiao.frontend import TextFiles, TokenTable

    files = TextFiles.read(args)
    table = TokenTable(files.tokenizer)
    found = eos_token_ids(files.ends[0], ends, files.ends[1])
    tokens = [table.raw(i) for i in range(vocab_size)]
    special = sorted(i for i in table.special_ids if i < vocab_size)
    return Vocabulary(tokens, special, [i for i in found if i < vocab_size])


def read_config(files: ModelFiles, args: EngineArgs) -> Any:
    """The config as ``qiao.models`` takes it: the file's keys for a family that is known, else transformers' class.

    The class would change nothing for the first, and importing it costs more time than the rest of a start.
    Raises ``ModelError`` naming the file.
    """
    raw = plain_config(files, args.hf_overrides)
    if has_family(raw):
        return Settings(raw, str(config_file(files)))
    return load_config(files, args.trust_remote_code, args.hf_overrides)


def _end_of(config: Any) -> Any:
    """``eos_token_id`` of the config of the text model."""
    if not isinstance(config, Settings):
        return getattr(config.get_text_config(), "eos_token_id", None)
    inner = config.get("text_config", {})
    return inner.get("eos_token_id", config.get("eos_token_id")) if isinstance(inner, Mapping) else None


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


def _load(placed: _Placed, backend: Backend) -> Model:
    args, files, config, shape, ops = placed.args, placed.files, placed.config, placed.shape, placed.ops
    start = time.monotonic()
    cache = kept_weights(placed, backend)
    dtype = dtype_of(shape.dtype)

    def weights() -> Iterator[tuple[str, Weight]]:
        return iter_weights(files, dequantize=placed.dequantized)

    def make(table: OpTable) -> Any:
        return create(config, table, dtype, args.max_model_len, placed.quantized)

    with freed_at_once():
        if cache is None:
            model: Model = make(ops)
            model.load(weights())
        else:
            model = load_kept(make, ops, weights, *cache, backend.hooks["restore_weight"])
        ops.synchronize(ops.device)
    logger.info("weights of %s loaded in %.1f s", args.model, time.monotonic() - start)
    return model


def kept_weights(placed: _Placed, backend: Backend) -> tuple[PackedCache, dict[str, Any]] | None:
    """Where this model's packed weights are kept, and under which key; None where they are not.

    They are for devices that take them back and read them from host memory, and models with a definition of their own.
    """
    files, config, ops = placed.files, placed.config, placed.ops
    folder, packing = cache_folder(placed.args.packed_cache), backend.capabilities.packing
    able = backend.on_host and packing and "restore_weight" in backend.hooks and isinstance(config, Settings)
    if folder is None or not able or any(one.device != ops.device for one in ops.matmul.values()):
        return None
    here = Path(__file__).parent
    key = {
        "model": (files.gguf or files.folder).name,
        "sources": source_identity(weight_files(files)),
        "config": config.raw,
        "dtype": placed.shape.dtype,
        "quantization": _dequantized(placed),
        "plugin": backend.plugin,
        "packing": packing,
        "code": code_identity(here / name for name in ("layers", "loading", "models", "quantization")),
    }
    return PackedCache(folder), key


def _dequantized(placed: _Placed) -> str | list[str]:
    """For a key: what becomes floating point at load."""
    lost = placed.dequantized
    return "none" if isinstance(lost, bool) and lost else sorted(lost or ())


def _offloading(placed: _Placed, draft: _Placed | None, backend: Backend) -> OffloadSizes | None:
    """Where evicted blocks are kept, under a name for all that their bytes depend on. Raises ``ParameterError``."""
    args, ops = placed.args, placed.ops
    if not (args.kv_offloading_size or args.kv_offloading_path):
        return None
    if ops.swap_blocks is None and ops.kv_layout not in ("NHD", "HND"):
        raise ParameterError(
            "kv_offloading_size", f"the device keeps its cache as {ops.kv_layout} and has no swap_blocks; leave it out"
        )
    here, models = Path(__file__).parent, [one for one in (placed, draft) if one is not None]
    facts = [
        {
            "sources": source_identity(weight_files(one.files)),
            "config": plain_config(one.files, one.args.hf_overrides),
            "dtypes": [one.shape.dtype, one.shape.cache_dtype, _dequantized(one)],
            "cache": [one.ops.kv_layout, one.plan.block_size, backend.plugin],
            "length": one.args.max_model_len,  # some ropes turn keys by it
            "code": code_identity(here / name for name in ("layers", "loading", "models", "quantization")),
        }
        for one in models
    ]
    identity = sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = None if args.kv_offloading_path is None else Path(args.kv_offloading_path).expanduser()
    host, disk = (int(size * 2**30) for size in (args.kv_offloading_size or 0.0, args.kv_offloading_disk_size))
    try:
        return OffloadSizes(host, private_folder(folder) if folder is not None else None, disk, identity)
    except OSError as error:
        raise ParameterError("kv_offloading_path", f"{folder} cannot be used: {error}") from error


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


def _size_cache(placed: _Placed, draft: _Placed | None, context: int, others: int) -> KVSize:
    args, shape, plan, ops = placed.args, placed.shape, placed.plan, placed.ops
    dtype, beside = dtype_of(shape.cache_dtype), 0
    if draft is not None and draft.ops.kv_device == ops.kv_device:
        beside = draft.shape.kv_bytes_per_token(dtype_of(draft.shape.cache_dtype).itemsize)
    total, free, source, share = _memory(args, ops)
    return size_kv(
        shape,
        total=total,
        free=free,
        source=source,
        utilization=share,
        reserve=_reserve(args, shape, dtype, ops),
        block_size=plan.block_size,
        element_size=dtype.itemsize,
        max_model_len=context,
        max_num_seqs=args.max_num_seqs,
        kv_bytes=args.kv_cache_memory_bytes,
        num_blocks=args.num_gpu_blocks_override,
        beside=beside,
        others=others,
    )


def _used_by_others(args: EngineArgs, ops: OpTable) -> int:
    """Bytes in use before the weights are there. A share that the user names is this engine's own, as in vLLM; the
    default is one of what there is, whoever uses it.
    """
    if args.gpu_memory_utilization is None:
        return 0
    total, free, _, _ = _memory(args, ops)
    return total - free


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


def _reserve(args: EngineArgs, shape: ModelShape, dtype: torch.dtype, ops: OpTable) -> int:
    """Bytes to keep free where the cache lies: a step's working memory, and LoRA adapters."""
    working = _activation_bytes(args, shape, dtype) if ops.kv_device == ops.device else 0
    beside = shape.max_loras > 0 and ops.matmul["dense"].device == ops.kv_device
    adapters = max(shape.max_loras, len(args.lora_modules))
    return working + (adapter_bytes(shape) // shape.max_loras * adapters if beside else 0)


def _activation_bytes(args: EngineArgs, shape: ModelShape, dtype: torch.dtype) -> int:
    """An upper estimate of one step's working memory in bytes: the widest layer, and the float32 logits twice."""
    widest = max(x.in_features + 2 * x.out_features for x in shape.linears if x.rows != "N")
    tokens, ahead = args.max_num_batched_tokens, args.speculation
    rows = min(args.max_num_seqs * (1 + (ahead.num_speculative_tokens if ahead is not None else 0)), tokens)
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
    ahead = args.speculation or SpeculativeConfig(method="ngram", num_speculative_tokens=0)
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
        priority_floor=args.priority_floor,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        tpot_target=None if args.tpot_target_ms is None else args.tpot_target_ms / 1000.0,
        max_num_queued=args.max_num_queued_reqs,
        seed=args.seed,
        check_integrity=args.check_integrity,
        enforce_eager=args.enforce_eager,
        num_speculative_tokens=ahead.num_speculative_tokens,
        prompt_lookup_min=ahead.prompt_lookup_min,
        prompt_lookup_max=ahead.prompt_lookup_max,
        most_drafting=ahead.disable_by_batch_size or args.max_num_seqs,
        max_loras=args.max_loras if args.enable_lora else 0,
        residency_sample=args.kv_cache_metrics_sample if args.kv_cache_metrics else 0.0,
        weight_sizes=tuple(weight_bytes(line, shape) for line in shape.linears) if args.enable_mfu_metrics else (),
    )


def _counts(counters: FallbackCounters) -> Callable[[], Sequence[FallbackCount]]:
    def counts() -> Sequence[FallbackCount]:
        return [
            FallbackCount(r.operator, r.calls, r.bytes_to_host, r.bytes_to_device, r.seconds)
            for r in counters.snapshot()
        ]

    return counts
