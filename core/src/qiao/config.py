"""Everything that a user can set about an engine, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from qiao.errors import ParameterError
from qiao.lora.request import parse_modules

_POSITIVE = ("max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "max_loras", "max_lora_rank")
_OPTIONAL_POSITIVE = ("block_size", "max_model_len", "num_gpu_blocks_override", "kv_cache_memory_bytes", "threads")
_DTYPES = ("auto", "float32", "float16", "bfloat16")
_OTHER_NAMES = {"half": "float16", "float": "float32"}
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
"""What ``kv_cache_dtype`` may be."""


def dtype_name(text: str) -> str:
    """``torch.half``, ``half`` and ``float16`` are one: torch's name without the prefix."""
    name = text.removeprefix("torch.")
    return _OTHER_NAMES.get(name, name)


_DRAFT_KEYS = {
    "ngram": ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size"),
    "draft_model": ("method", "num_speculative_tokens", "model", "revision", "disable_by_batch_size"),
}
_MEANT_ANYWAY = {"draft_tensor_parallel_size": 1, "enforce_eager": False, "disable_logprobs": False}
_DEFAULT_NGRAM = 5


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed ahead. ``method`` is ``ngram``, which looks in the sequence itself for what followed its
    last ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens, or ``draft_model``, which asks ``model``.

    Nobody guesses while more than ``disable_by_batch_size`` answers run.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int = _DEFAULT_NGRAM
    prompt_lookup_max: int = _DEFAULT_NGRAM
    model: str = ""
    revision: str | None = None
    disable_by_batch_size: int | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> SpeculativeConfig | None:
        """From vLLM's JSON object; None for an empty one. Raises ``ParameterError`` naming the key."""
        values = {key: value for key, value in given.items() if value is not None}
        if not values:
            return None
        if values.get("model") in ("ngram", "[ngram]"):
            values["method"] = "ngram"
            del values["model"]
        method = values.setdefault("method", "draft_model" if "model" in values else "ngram")
        if method not in _DRAFT_KEYS:
            raise ParameterError("speculative_config", f"method must be ngram or draft_model, got {method!r}")
        for key, meant in _MEANT_ANYWAY.items():
            if values.pop(key, meant) != meant:
                raise ParameterError("speculative_config", f"{key} can only be {meant!r}; leave it out")
        for key in values:
            if key not in _DRAFT_KEYS[method]:
                raise ParameterError(
                    "speculative_config", f"{key!r} is not known; {method} takes {', '.join(_DRAFT_KEYS[method])}"
                )
        _check_draft(values)
        if method == "ngram":  # one length alone is both
            longest = values.get("prompt_lookup_max", values.get("prompt_lookup_min", _DEFAULT_NGRAM))
            values["prompt_lookup_max"] = longest
            values.setdefault("prompt_lookup_min", longest)
            if values["prompt_lookup_min"] > longest:
                raise ParameterError("speculative_config", "prompt_lookup_min must not be above prompt_lookup_max")
        return cls(**values)


def _check_draft(values: Mapping[str, Any]) -> None:
    for key in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size"):
        value = values.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ParameterError("speculative_config", f"{key} must be an integer of at least 1, got {value!r}")
    if "num_speculative_tokens" not in values:
        raise ParameterError("speculative_config", "num_speculative_tokens is missing; 3 to 5 are usual")
    if values["method"] == "draft_model" and not isinstance(values.get("model"), str):
        raise ParameterError("speculative_config", "draft_model needs a model: a folder, a GGUF file or a hub model")


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Arguments of ``LLM(...)`` and ``qiao serve``; one field per flag.

    ``device`` is ``auto``, a plugin's name (``sim``), with an index (``sim:1``), or a torch device string.
    ``fallback`` is ``allow``, ``warn`` or ``deny``, or ``operator=policy`` items after it (``"warn,attention=deny"``).
    ``gpu_memory_utilization`` is the share of a device's memory that weights and cache may take; None means 0.9, and
    0.25 of what is free where the cache lies on the host, whose memory others share. ``fallback_budget`` is in bytes a
    step. ``drop`` leaves hooks of the plugin unused, to try what a gap costs. Sizes are in bytes, times in seconds.
    ``tpot_target_ms`` limits the prompt tokens beside running answers so that a step takes about so many milliseconds;
    None leaves them to ``max_num_batched_tokens``. ``priority_floor`` is the share of tokens that worse priorities get
    while better ones pass them by.
    ``packed_cache`` is the folder of packed weights, or ``off``; None is the variable ``QIAO_PACKED_CACHE``, else
    ``~/.cache/qiao/packed``.
    ``lora_modules`` are LoRA adapters that are there from the start (see ``qiao.lora.request.parse_modules``); a step
    mixes at most ``max_loras``, of at most ``max_lora_rank``.
    ``block_size`` in tokens; None takes what the device allows nearest to 16. ``kv_cache_dtype``: see ``KV_DTYPES``,
    ``auto`` is the model's own. ``kv_offloading_size`` are GiB of host memory for what the prefix cache evicts, and
    ``kv_offloading_path`` a folder with ``kv_offloading_disk_size`` GiB behind it; None for neither.
    ``kv_cache_metrics`` times a share ``kv_cache_metrics_sample`` of the cache's blocks, and ``enable_mfu_metrics``
    estimates operations and bytes of each step, for ``/metrics``.
    An engine process that has work and says nothing for ``step_timeout`` seconds is ended; 0 for never.
    ``speculative_config`` is vLLM's, see ``SpeculativeConfig``.

    Raises ``ParameterError`` naming the field.
    """

    model: str
    tokenizer: str | None = None
    served_model_name: tuple[str, ...] = ()
    revision: str | None = None
    tokenizer_revision: str | None = None
    trust_remote_code: bool = False
    download_dir: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    seed: int = 0
    max_model_len: int | None = None
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    max_logprobs: int = 20
    pooler_config: dict[str, Any] = field(default_factory=dict)
    device: str = "auto"
    fallback: str = "warn"
    fallback_budget: int | None = None
    drop: tuple[str, ...] = ()
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    kv_offloading_size: float | None = None
    kv_offloading_path: str | None = None
    kv_offloading_disk_size: float = 10.0
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_num_queued_reqs: int = 1024
    long_prefill_token_threshold: int = 0
    tpot_target_ms: float | None = None
    scheduling_policy: str = "fcfs"
    priority_floor: float = 0.05
    speculative_config: dict[str, Any] = field(default_factory=dict)
    enforce_eager: bool = False
    threads: int | None = None
    packed_cache: str | None = None
    enable_lora: bool = False
    lora_modules: tuple[str, ...] = ()
    max_loras: int = 8
    max_lora_rank: int = 16
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01
    enable_mfu_metrics: bool = False
    step_timeout: float = 600.0
    check_integrity: bool = False

    def __post_init__(self) -> None:
        if not self.model:
            raise ParameterError("model", "must name a folder, a GGUF file, a hub model or pypi:PACKAGE")
        for name in _POSITIVE + _OPTIONAL_POSITIVE:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_POSITIVE:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParameterError(name, f"must be an integer of at least 1, got {value!r}")
        if self.tokenizer is None and self.tokenizer_revision not in (None, self.revision):
            raise ParameterError(
                "tokenizer_revision", "needs tokenizer; the model's own tokenizer comes with the model's revision"
            )
        share = self.gpu_memory_utilization
        if share is not None and (not isinstance(share, int | float) or not 0.0 < share <= 1.0):
            raise ParameterError("gpu_memory_utilization", f"must be a number in (0, 1], got {share!r}")
        threshold = self.long_prefill_token_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
            raise ParameterError("long_prefill_token_threshold", f"must be 0 (off) or more, got {threshold!r}")
        target = self.tpot_target_ms
        if target is not None and (isinstance(target, bool) or not isinstance(target, int | float) or not target > 0.0):
            raise ParameterError("tpot_target_ms", f"must be a number above 0, got {target!r}")
        if target is not None and not self.enable_chunked_prefill:
            raise ParameterError("tpot_target_ms", "needs chunked prefill: it works by the size of the chunks")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ParameterError("scheduling_policy", f"must be fcfs or priority, got {self.scheduling_policy!r}")
        floor = self.priority_floor
        if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0.0 <= floor < 1.0:
            raise ParameterError("priority_floor", f"must be a number from 0 (none) to below 1, got {floor!r}")
        if dtype_name(self.dtype) not in _DTYPES:
            names = ", ".join((*_DTYPES, *_OTHER_NAMES))
            raise ParameterError("dtype", f"must be one of {names}, got {self.dtype!r}")
        self._check_kv_dtype()
        self._check_offloading()
        sample = self.kv_cache_metrics_sample
        if isinstance(sample, bool) or not isinstance(sample, int | float) or not 0.0 < sample <= 1.0:
            raise ParameterError("kv_cache_metrics_sample", f"must be a number in (0, 1], got {sample!r}")
        limit = self.step_timeout
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0.0 <= limit < float("inf"):
            raise ParameterError("step_timeout", f"must be 0 (no limit) or more seconds, got {limit!r}")
        SpeculativeConfig.parse(self.speculative_config)
        self._check_adapters()
        if not self.enable_chunked_prefill and self.max_model_len and self.max_num_batched_tokens < self.max_model_len:
            raise ParameterError(
                "max_num_batched_tokens",
                f"without chunked prefill it must be at least max_model_len ({self.max_model_len}), "
                f"got {self.max_num_batched_tokens}",
            )

    def _check_adapters(self) -> None:
        adapters = parse_modules(self.lora_modules)
        if adapters and not self.enable_lora:
            raise ParameterError("lora_modules", "needs enable_lora; add --enable-lora")
        for one in adapters:
            if one.lora_name in (self.served_model_name or (self.model,)):
                raise ParameterError("lora_modules", f"{one.lora_name!r} is the name of the model itself")

    def _check_kv_dtype(self) -> None:
        name = self.kv_cache_dtype
        if name.startswith("fp8"):
            raise ParameterError(
                "kv_cache_dtype", f"{name!r} is not supported yet; int8 takes the same memory and is more exact"
            )
        if name not in KV_DTYPES:
            raise ParameterError("kv_cache_dtype", f"must be one of {', '.join(KV_DTYPES)}, got {name!r}")

    def _check_offloading(self) -> None:
        for name in ("kv_offloading_size", "kv_offloading_disk_size"):
            size = getattr(self, name)
            if size is not None and (
                isinstance(size, bool) or not isinstance(size, int | float) or not 0.0 <= size < 2**30
            ):
                raise ParameterError(name, f"must be GiB, 0 or more, got {size!r}")
        if (self.kv_offloading_size or self.kv_offloading_path) and not self.enable_prefix_caching:
            raise ParameterError("kv_offloading_size", "needs prefix caching: it keeps what that evicts")

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """``speculative_config`` with its defaults; None where nothing is guessed."""
        return SpeculativeConfig.parse(self.speculative_config)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All field names."""
        return tuple(f.name for f in fields(cls))
