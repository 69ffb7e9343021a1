"""What the engine is built with: resolved numbers, no user flags."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qiao.engine.tiers import OffloadSizes
from qiao.errors import ParameterError

_POSITIVE = (
    "num_blocks",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "vocab_size",
    "max_num_queued",
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and policies of one engine.

    ``num_blocks`` blocks of ``block_size`` tokens are the whole KV cache, of ``dtype``. ``max_num_batched_tokens`` is
    the token budget of a step and ``max_num_seqs`` the most sequences in it; ``long_prefill_token_threshold`` caps one
    prompt's chunk (0: only the budget does; no effect without chunked prefill). ``tpot_target`` in seconds is what a
    step with decodes should take; chunks adapt to it (see ``qiao.engine.pacing``). ``scheduling_policy`` is ``fcfs`` or
    ``priority``; of the tokens that pass worse priorities by, these get ``priority_floor``, a share below 1. More than
    ``max_num_queued`` waiting sequences are refused. ``seed`` starts the generator that seeds unseeded requests.
    ``check_integrity`` compares blocks and references whenever the engine falls idle. ``enforce_eager`` records no
    decode steps. A draft has at most ``num_speculative_tokens`` tokens (0: there are none), from a draft model where
    the engine is given one, else from what followed an earlier occurrence of the last ``prompt_lookup_min`` to
    ``prompt_lookup_max`` tokens; nobody drafts while more than ``most_drafting`` answers run. ``kv_offloading`` is
    where evicted blocks of the prefix cache are kept, None for nowhere. A step mixes at most ``max_loras`` LoRA
    adapters; 0 means that there are none. Of the allocated blocks a share ``residency_sample`` is timed (see
    ``qiao.engine.residency``). With ``weight_sizes``, bytes of each of the model's linear layers, work is estimated
    (see ``qiao.engine.work``).

    Raises ``ParameterError`` naming the field.
    """

    num_blocks: int
    vocab_size: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    dtype: torch.dtype = torch.float32
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    tpot_target: float | None = None
    priority_floor: float = 0.05
    max_num_queued: int = 1024
    seed: int = 0
    check_integrity: bool = False
    enforce_eager: bool = False
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    most_drafting: int = 1 << 30
    kv_offloading: OffloadSizes | None = None
    max_loras: int = 0
    residency_sample: float = 0.0
    weight_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ParameterError(name, f"must be at least 1, got {getattr(self, name)}")
        if self.long_prefill_token_threshold < 0:
            raise ParameterError("long_prefill_token_threshold", "must be 0 (off) or more")
        if self.tpot_target is not None and not (self.tpot_target > 0.0 and self.enable_chunked_prefill):
            raise ParameterError("tpot_target_ms", f"must be above 0 and needs chunked prefill, got {self.tpot_target}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ParameterError("scheduling_policy", f"must be fcfs or priority, got {self.scheduling_policy!r}")
        if self.kv_offloading is not None and not self.enable_prefix_caching:
            raise ParameterError("kv_offloading_size", "needs prefix caching: it keeps what that evicts")
        if not 0.0 <= self.priority_floor < 1.0:
            raise ParameterError("priority_floor", f"must be 0 (none) or more and below 1, got {self.priority_floor}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.capacity:
            raise ParameterError(
                "max_num_batched_tokens",
                f"without chunked prefill it must hold the longest sequence ({self.capacity} tokens), "
                f"got {self.max_num_batched_tokens}; raise it, lower max_model_len, or allow chunked prefill",
            )

    @property
    def capacity(self) -> int:
        """The most tokens that one sequence can have: the context, or the whole cache if that is smaller."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def capped_blocks(self, share: float) -> int:
        """Blocks that a tenant with a share of the cache may hold; at least one."""
        return max(1, int(share * self.num_blocks))

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a full block table."""
        return -(-self.capacity // self.block_size)
