"""vLLM's keyword arguments as ``EngineArgs``."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from qiao.config import EngineArgs
from qiao.errors import ParameterError, UsageError

logger = logging.getLogger(__name__)

_IGNORED = frozenset(
    {
        "allowed_local_media_path",
        "allowed_media_domains",
        "attention_config",
        "compilation_config",
        "convert",
        "disable_async_output_proc",
        "disable_custom_all_reduce",
        "disable_log_requests",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_log_requests",
        "guided_decoding_backend",
        "hf_token",
        "max_cpu_loras",
        "max_lora_rank",
        "max_loras",
        "max_seq_len_to_capture",
        "mm_processor_kwargs",
        "num_scheduler_steps",
        "pooler_config",
        "preemption_mode",
        "prefix_caching_hash_algo",
        "structured_outputs_config",
        "swap_space",
        "use_v2_block_manager",
        "worker_cls",
    }
)
"""vLLM's arguments that change nothing about a text model's answers here: accepted with a warning."""

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "enable_expert_parallel": (False,),
    "cpu_offload_gb": (0,),
    "enable_lora": (False,),
    "speculative_config": (None,),
    "kv_transfer_config": (None,),
    "logits_processors": (None, []),
    "quantization_config": (None,),
    "skip_tokenizer_init": (False,),
    "tokenizer_mode": ("auto", "hf", "slow"),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "disable_sliding_window": (False,),
}
"""vLLM's arguments whose other values would change answers or memory, and are not there yet: refused."""

_RENAMED = {"device_memory_utilization": "gpu_memory_utilization"}


def engine_args(model: str, given: Mapping[str, Any]) -> EngineArgs:
    """``EngineArgs`` from vLLM's keyword arguments.

    Raises ``TypeError`` with a suggestion for an unknown name, ``UsageError`` for what is not there yet.
    """
    known = set(EngineArgs.names())
    values: dict[str, Any] = {}
    rope: dict[str, Any] = {}
    for written, value in given.items():
        name = _RENAMED.get(written, written)
        if name in known:
            values[name] = value
        elif name in ("rope_scaling", "rope_theta"):
            if value is not None:
                rope[name] = value
        elif name in _ONLY:
            if value not in _ONLY[name]:
                allowed = " or ".join(repr(v) for v in _ONLY[name])
                raise UsageError(f"{name}={value!r} is not supported yet; leave it out or pass {allowed}")
        elif name in _IGNORED:
            logger.warning("LLM: the argument %s has no effect here", name)
        else:
            raise TypeError(_unknown(name, known))
    values = _converted(values)
    if rope:
        values["hf_overrides"] = {**values.get("hf_overrides", {}), **rope}
    return EngineArgs(model=model, **values)


def _converted(values: dict[str, Any]) -> dict[str, Any]:
    """Types that vLLM's users pass, as ``EngineArgs`` holds them. None means the default, as there."""
    optional = {field.name for field in fields(EngineArgs) if field.default is None}
    result = {name: value for name, value in values.items() if value is not None or name in optional}
    for name in ("served_model_name", "drop"):
        value = result.get(name)
        if name in result:
            result[name] = (value,) if isinstance(value, str) else tuple(value or ())
    for name in ("hf_overrides", "override_generation_config"):
        if callable(result.get(name)):
            raise ParameterError(name, "must be a dict; a function is not supported")
        if name in result:
            result[name] = dict(result[name] or {})
    for name in ("dtype", "device", "kv_cache_dtype"):
        if name in result:
            result[name] = str(result[name])
    if "kv_cache_dtype" in result:
        result["kv_cache_dtype"] = result["kv_cache_dtype"].removeprefix("torch.")
    return result


def _unknown(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known | _IGNORED | set(_ONLY)), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"LLM() got an unexpected keyword argument {name!r}{hint}"
