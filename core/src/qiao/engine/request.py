"""What goes into the engine and what comes out: plain structs, the same in one process and over a socket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from qiao.errors import KernelError, OverloadedError, ParameterError, QiaoError
from qiao.sampling_params import SamplingParams


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt. The front end has tokenised, resolved ``max_tokens`` and checked everything against ``EngineInfo``.

    ``params.n`` sequences share the prompt. A lower ``priority`` is served first. ``cache_salt``, the client's, and
    ``cache_scope``, the tenant's, separate prefix caches. ``eos_token_ids`` end a sequence unless
    ``params.ignore_eos``. ``arrival`` is ``time.time()`` in seconds. Under load tenants share the engine by ``weight``;
    a tenant's sequences hold at most ``kv_share`` of the cache. A request that has waited ``max_wait`` seconds in the
    engine is dropped. ``grammar`` is llguidance's, which the answer follows, from the start or once ``grammar_after``
    has appeared in it; an answer that does not begin with ``grammar_before`` does not wait for that. With ``pooling``
    (``last`` or ``mean``) the prompt comes back as a vector, and ``params.max_tokens`` is 0. ``adapter`` is the number
    of a LoRA adapter, 0 for the model alone.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    eos_token_ids: list[int] = []
    priority: int = 0
    cache_salt: str = ""
    cache_scope: str = ""
    tenant: str = ""
    weight: float = 1.0
    kv_share: float | None = None
    max_wait: float | None = None
    grammar: str = ""
    grammar_after: str = ""
    grammar_before: str = ""
    pooling: str = ""
    adapter: int = 0


class TokenLogprobs(msgspec.Struct, omit_defaults=True):
    """One position: the token itself first, then the best alternatives; its own ``rank`` counts from 1."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class SequenceOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step added to one of a request's sequences.

    ``finish_reason`` is ``stop``, ``length``, ``abort``, ``error``, ``late`` (dropped at its deadline) or None while it
    runs; ``stop_reason`` is the stop token id, None for EOS. ``prompt_logprobs`` comes once, on the first output of
    sequence 0, its first entry None. ``scheduled`` and ``first_token`` are ``time.time()`` in seconds, sent with the
    first token. ``error_field`` is the request's field that an ``error`` is about, empty for an error of the
    computation. ``embedding`` is a vector of little-endian float32 numbers, not normalised.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    scheduled: float | None = None
    first_token: float | None = None
    embedding: bytes | None = None
    error: str | None = None
    error_field: str = ""

    def failure(self) -> QiaoError:
        """What to raise for an output with ``finish_reason`` ``error``."""
        text = self.error or "the engine failed this request without a reason"
        if self.error_field == BUSY:
            return OverloadedError(text, retry_after=10.0)
        return ParameterError(self.error_field, text) if self.error_field else KernelError(text)


BUSY = "(busy)"
"""``error_field`` of what failed because others were ahead of it for too long."""


class FallbackCount(msgspec.Struct):
    """Running totals of one operator that is placed on the host."""

    operator: str
    calls: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    seconds: float = 0.0


class Histogram(msgspec.Struct):
    """Observations counted by bucket, the last one for all above; ``counts`` is empty before the first."""

    counts: list[int] = []
    sum: float = 0.0

    def observe(self, value: float, bounds: Sequence[float]) -> None:
        """Count ``value`` into the first bucket of ``bounds`` that is not below it."""
        if not self.counts:
            self.counts = [0] * (len(bounds) + 1)
        self.counts[bisect_left(bounds, value)] += 1
        self.sum += value


class OffloadStats(msgspec.Struct, kw_only=True):
    """KV blocks beside the device: tokens asked for behind a prefix hit, and those that came back, by tier; bytes.

    ``store_*`` are copies from the device and ``load_*`` copies back, ``lookups`` seconds of a look-up, and ``waits``
    seconds that requests waited for files. ``save_outcomes`` and ``fetches`` have the keys of
    ``names.SAVE_OUTCOMES`` and ``names.FETCH_STAGES``. ``failures`` are blocks that no tier had room for. ``pending``
    waits to be written to files, of at most ``transfer_capacity`` bytes; ``fetched`` was read from them.
    """

    queries: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    host_bytes: int = 0
    host_capacity: int = 0
    disk_bytes: int = 0
    store_bytes: int = 0
    store_seconds: float = 0.0
    store_sizes: Histogram = msgspec.field(default_factory=Histogram)
    load_bytes: int = 0
    load_seconds: float = 0.0
    load_sizes: Histogram = msgspec.field(default_factory=Histogram)
    load_blocks: int = 0
    lookups: Histogram = msgspec.field(default_factory=Histogram)
    waits: Histogram = msgspec.field(default_factory=Histogram)
    save_outcomes: dict[str, int] = {}
    failures: int = 0
    pending_blocks: int = 0
    pending_bytes: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    transfer_capacity: int = 1
    fetches: dict[str, int] = {}


class ResidencyStats(msgspec.Struct, kw_only=True):
    """How long sampled blocks stay, in seconds; see ``qiao.engine.residency``."""

    lifetime: Histogram = msgspec.field(default_factory=Histogram)
    idle: Histogram = msgspec.field(default_factory=Histogram)
    reuse_gap: Histogram = msgspec.field(default_factory=Histogram)


class WorkStats(msgspec.Struct, kw_only=True):
    """Estimated work of all steps; see ``qiao.engine.work``."""

    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot after a step. Totals only grow; the rest is the state of this moment. Shares are 0 to 1.

    ``captured_steps`` of ``steps`` were replays of a recorded program; ``not_captured`` says why decode steps are not.
    ``step_sizes`` are the tokens of the steps, in the buckets of ``names.STEP_BUCKETS``. ``prompt_budget`` is how many
    prompt tokens the last step might take, None without a TPOT target. Of ``drafts`` with ``draft_tokens`` in all,
    ``accepted_tokens`` came true; ``accepted_per_position[i]`` counts token i of a draft. ``offload`` is None where
    evicted blocks are lost. ``running_adapters`` and ``waiting_adapters`` are the names of the LoRA adapters that
    running and waiting requests use; None where adapters are not enabled. ``waiting_by_class`` has the waiting ones by
    the priority class that is nearest to their priority, and those that waited too long. Of ``prompt_tokens`` those
    ``from_device`` were in the prefix cache when their request first ran, and those ``from_outside`` came from host
    memory or files.
    ``residency`` and ``work`` are None where they are not asked for.
    """

    running: int = 0
    waiting: int = 0
    waiting_by_class: dict[str, int] = {}
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    prompt_from_device: int = 0
    prompt_from_outside: int = 0
    generation_tokens: int = 0
    steps: int = 0
    last_step_tokens: int = 0
    step_sizes: Histogram = msgspec.field(default_factory=Histogram)
    utilization: float | None = None
    prompt_budget: int | None = None
    fallbacks: list[FallbackCount] = []
    captured_steps: int = 0
    not_captured: str = ""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = []
    offload: OffloadStats | None = None
    residency: ResidencyStats | None = None
    work: WorkStats | None = None
    running_adapters: list[str] | None = None
    waiting_adapters: list[str] = []


class EngineInfo(msgspec.Struct, kw_only=True):
    """Facts fixed at start, for the front end. ``plan`` is the placement plan as JSON-ready data.

    ``eos_token_ids`` are those of the model's config; generation config and tokenizer may know more.
    ``kv_block_bytes`` are those of a block over all layers.
    """

    device: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_queued: int
    dtype: str
    kv_cache_dtype: str = ""
    eos_token_ids: list[int] = []
    kv_explanation: str = ""
    kv_block_bytes: int = 0
    plan: dict = {}  # type: ignore[type-arg]

    @property
    def kv_tokens(self) -> int:
        """Tokens that the whole cache can hold for one sequence."""
        return self.num_blocks * self.block_size
