"""Everything that a user can set about an engine, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from qiao.errors import ParameterError

_POSITIVE = ("max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs")
_OPTIONAL_POSITIVE = ("block_size", "max_model_len", "num_gpu_blocks_override", "kv_cache_memory_bytes", "threads")
_DTYPES = ("auto", "float32", "float16", "bfloat16")
_OTHER_NAMES = {"half": "float16", "float": "float32"}
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
"""What ``kv_cache_dtype`` may be."""


def dtype_name(text: str) -> str:
    """``torch.half``, ``half`` and ``float16`` are one: torch's name without the prefix."""
    name = text.removeprefix("torch.")
    return _OTHER_NAMES.get(name, name)


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
    ``block_size`` in tokens; None takes what the device allows nearest to 16. ``kv_cache_dtype``: see ``KV_DTYPES``,
    ``auto`` is the model's own.

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
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_num_queued_reqs: int = 1024
    long_prefill_token_threshold: int = 0
    tpot_target_ms: float | None = None
    scheduling_policy: str = "fcfs"
    priority_floor: float = 0.05
    enforce_eager: bool = False
    threads: int | None = None
    packed_cache: str | None = None
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
        if not self.enable_chunked_prefill and self.max_model_len and self.max_num_batched_tokens < self.max_model_len:
            raise ParameterError(
                "max_num_batched_tokens",
                f"without chunked prefill it must be at least max_model_len ({self.max_model_len}), "
                f"got {self.max_num_batched_tokens}",
            )

    def _check_kv_dtype(self) -> None:
        name = self.kv_cache_dtype
        if name.startswith("fp8"):
            raise ParameterError(
                "kv_cache_dtype", f"{name!r} is not supported yet; int8 takes the same memory and is more exact"
            )
        if name not in KV_DTYPES:
            raise ParameterError("kv_cache_dtype", f"must be one of {', '.join(KV_DTYPES)}, got {name!r}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All field names."""
        return tuple(f.name for f in fields(cls))
