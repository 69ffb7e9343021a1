"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from copy import copy, deepcopy
from heapq import heappop, heappush

import numpy as np
import torch

from qiao.engine.adapters import NOT_ENABLED, AdapterPool, names_of
from qiao.engine.blocks import BlockManager
from qiao.engine.config import EngineConfig
from qiao.engine.draft_model import DraftModel
from qiao.engine.drafting import DraftCounts, Drafter, DraftParts
from qiao.engine.grammars import GrammarCompiler, GrammarQueue, Vocabulary
from qiao.engine.integrity import check_scheduler
from qiao.engine.offloading import BlockCopier, Offload
from qiao.engine.pooling import embedding
from qiao.engine.prefix import PrefixCache
from qiao.engine.prompt_lookup import PromptLookup
from qiao.engine.request import BUSY, EngineRequest, EngineStats, FallbackCount, SequenceOutput, TokenLogprobs
from qiao.engine.residency import Residency
from qiao.engine.rows import Int64, RowTable
from qiao.engine.runner import Runner
from qiao.engine.sampler import NO_TOKEN, Sampled
from qiao.engine.scheduler import Scheduler, Step
from qiao.engine.scoring import token_logits
from qiao.engine.sequence import Request, Sequence, Status
from qiao.engine.validation import check_request
from qiao.engine.work import WorkEstimate
from qiao.errors import KernelError, OverloadedError, ParameterError, PromptTooLongError, QiaoError
from qiao.models.base import Model
from qiao.observability.names import STEP_BUCKETS
from qiao.optable import OpTable, operator_of

logger = logging.getLogger(__name__)

_UNCHOSEN = "the logits hold NaN or infinity, or no token is left after allowed_token_ids, bad_words and min_tokens"


class Engine:
    """Continuous batching over one model. Not thread safe: one owner calls everything.

    ``draft`` is a smaller model of the same vocabulary that guesses ahead, see ``qiao.engine.drafting``.
    Raises ``torch.OutOfMemoryError`` where the KV cache does not fit.
    """

    def __init__(
        self,
        model: Model,
        ops: OpTable,
        config: EngineConfig,
        fallback_counts: Callable[[], Items[FallbackCount]] = tuple,
        clock: Callable[[], float] = time.perf_counter,
        vocabulary: Callable[[], Vocabulary] | None = None,
        draft: DraftParts | None = None,
        adapters: AdapterPool | None = None,
    ) -> None:
        self.config = config
        self._adapters = adapters
        self._ops = ops
        self._fallback_counts = fallback_counts
        self._clock = clock
        self._rows = RowTable(config.max_num_seqs, config.max_blocks_per_seq)
        self._runner = Runner(model, ops, config, self._rows, adapters=adapters)
        self._drafter = self._make_drafter(draft)
        self._draft_counts = DraftCounts()
        self._offload = self._make_offload()
        cache = PrefixCache() if config.enable_prefix_caching else None
        keep = None if self._offload is None else self._offload.save
        residency = Residency(config.residency_sample) if config.residency_sample else None
        self._blocks = BlockManager(config.num_blocks, config.block_size, cache, keep, residency)
        self._work = WorkEstimate(model.shape, sizes, config.dtype.itemsize) if (sizes := config.weight_sizes) else None
        self._scheduler = Scheduler(
            config, self._blocks, self._rows, self._runner.sampler.join, self._drafter, self._offload
        )
        compiler = GrammarCompiler(vocabulary, config.vocab_size) if vocabulary is not None else None
        self._grammars = GrammarQueue(compiler)
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._deadlines: list[tuple[float, int, str]] = []
        self._seeds = random.Random(config.seed)  # noqa: S311 - sampling, not secrets
        self._totals = EngineStats(kv_blocks_total=config.num_blocks)

    def _make_drafter(self, draft: DraftParts | None) -> Drafter | None:
        config = self.config
        if not config.num_speculative_tokens:
            return None
        if draft is not None:
            return DraftModel(draft, config, self._rows, self._runner.sampler)
        lengths = config.prompt_lookup_min, config.prompt_lookup_max
        return PromptLookup(config.num_speculative_tokens, *lengths, config.most_drafting)

    def _make_offload(self) -> Offload | None:
        sizes, caches = self.config.kv_offloading, self._runner.caches
        if sizes is None:
            return None
        if isinstance(self._drafter, DraftModel):
            caches = caches + self._drafter.caches
        return Offload(BlockCopier(caches, self._ops.swap_blocks), self.config.block_size, sizes)

    # requests ---------------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """Queue ``request``.

        Raises ``ParameterError`` for a wrong field, ``PromptTooLongError`` where the prompt can never fit, and
        ``OverloadedError`` where the queue is full. Nothing is kept of a refused request.
        """
        config = self.config
        if request.request_id in self._requests:
            raise ParameterError("request_id", f"{request.request_id!r} is running already")
        check_request(request, config)
        waiting = len(self._scheduler.waiting) + len(self._grammars)
        if waiting >= config.max_num_queued:
            raise OverloadedError(
                f"{waiting} sequences wait, the limit is {config.max_num_queued}; "
                "try again later or raise --max-num-queued-reqs"
            )
        state = self._make(request)
        self._scheduler.enter(state)
        if request.grammar:
            self._grammars.add(state, request)
        else:
            self._scheduler.add(state.sequences[0])
        self._requests[state.id] = state
        if state.adapter is not None:
            self.adapters.enter(state.adapter)
        if request.max_wait is not None:
            heappush(self._deadlines, (time.monotonic() + request.max_wait, self._arrivals, state.id))

    def _make(self, request: EngineRequest) -> Request:
        params, limit = request.params, self.config.capacity
        cap = None
        if request.kv_share is not None:
            cap = self.config.capped_blocks(request.kv_share)
            limit = min(limit, cap * self.config.block_size)
        adapter = self.adapters.find(request.adapter) if request.adapter else None
        state = Request(request, self._scheduler.shares.account(request.tenant, request.weight, cap), adapter)
        if params.max_tokens is not None:
            limit = min(limit, len(request.prompt_token_ids) + params.max_tokens)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        level = request.priority if self.config.scheduling_policy == "priority" else 0
        self._arrivals += 1
        state.sequences = [
            Sequence(state, i, request, (level, self._arrivals, i), limit, seed + i) for i in range(params.n)
        ]
        return state

    def abort(self, request_ids: Iterable[str], index: int | None = None) -> None:
        """End requests at once, or only their sequence ``index``; their blocks are free on return.

        Unknown and finished ids are ignored. No output follows.
        """
        for request_id in list(request_ids):
            request = self._requests.get(request_id)
            if request is not None and not self._grammars.abort(request_id, index):
                chosen = request.sequences if index is None else request.sequences[index : index + 1]
                self._finish_all(chosen)
        self._idle_check()

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._requests)

    # steps ------------------------------------------------------------------------------------------------------------

    def step(self) -> list[SequenceOutput]:
        """Run one step and return what it added.

        An error of the model or an operator ends the requests of the step with ``finish_reason`` ``error``; the
        engine goes on.
        """
        ended = (self._drop_late() if self._deadlines else []) + self._start_compiled()
        if not self._scheduler.has_work:
            self._idle_check()
            return ended
        return ended + self._run_step()

    def _start_compiled(self) -> list[SequenceOutput]:
        """Queue the requests whose grammars are ready; outputs of those that cannot be served."""
        outputs: list[SequenceOutput] = []
        if not len(self._grammars):
            return outputs
        for request, aborted, error in self._grammars.take(wait=not self._scheduler.has_work):
            if error is not None:
                request.fault_field = BUSY if isinstance(error, OverloadedError) else getattr(error, "field", "")
                outputs += self._fail([request], getattr(error, "detail", str(error)))
                continue
            self._scheduler.add(request.sequences[0])
            self._finish_all(request.sequences[i] for i in sorted(aborted))
        return outputs

    def _run_step(self) -> list[SequenceOutput]:
        began = self._clock()
        step = self._scheduler.schedule()
        assert step.seqs, "nothing can be scheduled although requests wait"
        self._note_scheduled(step)
        try:
            if step.drafted and self._drafter is not None:
                self._drafter.complete(step)
            batch = self._runner.build(step)
            result = self._runner.run(step, batch)
            if self._drafter is not None:
                self._drafter.follow(step, batch)
        except Exception as error:  # whatever a vendor's operator raises is one request's failure, not the engine's
            logger.exception("a step of %d sequences failed", len(step.seqs))
            outputs = self._fail({s.request.id: s.request for s in step.seqs}.values(), _describe(error, self._ops))
        else:
            if batch.sampled:  # so the device has been waited for
                self._pace(step, self._clock() - began)
            self._advance(step)
            outputs = self._collect(step, batch.sampled, result)
            if step.drafted:
                self._end_drafts(batch.sampled, result)
        self._idle_check()
        return outputs

    def _note_scheduled(self, step: Step) -> None:
        totals = self._totals
        totals.steps += 1
        totals.last_step_tokens = step.num_tokens
        totals.step_sizes.observe(step.num_tokens, STEP_BUCKETS)
        for seq in step.seqs:
            if seq.request.scheduled is None:
                seq.request.scheduled = time.time()
                totals.prompt_tokens += seq.num_prompt
                totals.prompt_from_device += seq.num_computed - seq.num_restored
                totals.prompt_from_outside += seq.num_restored
        if self._work is not None:
            self._work.add(step)

    def _pace(self, step: Step, seconds: float) -> None:
        pacer = self._scheduler.pacer
        if pacer is not None:
            decodes = step.num_decodes
            pacer.observe(decodes, step.num_tokens - decodes, seconds)

    def _advance(self, step: Step) -> None:
        """Count the computed tokens and make newly filled blocks findable. Drafts count once they are accepted."""
        cached, block_size, drafted = self._blocks.cache is not None, self.config.block_size, step.drafted
        for seq, count in zip(step.seqs, step.counts, strict=True):
            seq.num_computed += count - len(seq.draft) if drafted else count
            if cached and seq.num_computed // block_size > seq.num_registered:
                self._register(seq)

    def _register(self, seq: Sequence) -> None:
        """Make the filled blocks of ``seq`` findable."""
        cache, block_size = self._blocks.cache, self.config.block_size
        full = seq.num_computed // block_size
        if cache is not None and full > seq.num_registered:
            keys = seq.keys_up_to(full, block_size)
            for i in range(seq.num_registered, full):
                cache.register(seq.blocks[i], keys[i])
            seq.num_registered = full

    def _end_drafts(self, sampled: list[Sequence], result: Sampled) -> None:
        for seq, tokens in zip(sampled, result.token_ids, strict=True):
            if seq.draft:
                self._draft_counts.add(len(seq.draft), len(tokens) - 1)
                seq.draft = []

    def _collect(self, step: Step, sampled: list[Sequence], result: Sampled) -> list[SequenceOutput]:
        outputs = self._collect_scored(step)
        logprobs = result.logprobs or [None] * len(sampled)
        failed: dict[str, Request] = {}
        finished: list[Sequence] = []
        for seq, tokens, scored in zip(sampled, result.token_ids, logprobs, strict=True):
            if tokens[0] == NO_TOKEN or seq.request.fault is not None:
                failed[seq.request.id] = seq.request
                continue
            output = self._append(seq, tokens, scored)
            outputs.append(output)
            if output.finish_reason is not None:
                finished.append(seq)
        self._finish_all(finished)
        if failed:
            outputs = [o for o in outputs if o.request_id not in failed]
            for request in failed.values():
                outputs += self._fail([request], request.fault or _UNCHOSEN, distrusted=True)
        return outputs

    def _append(self, seq: Sequence, token_ids: list[int], scored: list[TokenLogprobs] | None) -> SequenceOutput:
        """Add sampled tokens, one unless a draft was accepted, up to the one that is the last."""
        tokens = seq.tokens
        output = SequenceOutput(
            request_id=seq.request.id,
            index=seq.index,
            token_ids=token_ids,
            logprobs=scored,
            num_cached_tokens=seq.request.cached_tokens,
        )
        if len(tokens) == seq.num_prompt:
            self._first(seq, output)
        taken = 0
        for token in token_ids:
            taken += 1
            tokens.append(token)
            ended = seq.grammar is not None and seq.grammar.advance(token)
            if token in seq.stops:
                output.finish_reason, output.stop_reason = "stop", seq.stops[token]
            elif ended:
                output.finish_reason = "stop"
            elif len(tokens) >= seq.limit:
                output.finish_reason = "length"
            if output.finish_reason is not None:
                break
        self._totals.generation_tokens += taken
        if len(token_ids) > 1:
            seq.num_computed += taken - 1
            self._register(seq)
            output.token_ids = token_ids[:taken]
            output.logprobs = scored and scored[:taken]
        return output

    def _collect_scored(self, step: Step) -> list[SequenceOutput]:
        """Outputs of the sequences that end with their prompt, because no token was asked for."""
        outputs: list[SequenceOutput] = []
        forks = dict(step.forks)
        for i, leader in enumerate(step.seqs):
            if leader.num_computed < len(leader.tokens) or leader.wants_token:
                continue
            if leader.request.fault is not None:
                outputs += self._fail([leader.request], leader.request.fault, distrusted=True)
                continue
            group = [leader, *forks.get(i, ())]
            for seq in group:
                output = SequenceOutput(
                    request_id=seq.request.id,
                    index=seq.index,
                    finish_reason="length",
                    num_cached_tokens=seq.request.cached_tokens,
                    embedding=embedding(seq),
                )
                self._first(seq, output)
                outputs.append(output)
            self._finish_all(group)
        return outputs

    @staticmethod
    def _first(seq: Sequence, output: SequenceOutput) -> None:
        """What only the first output of a sequence carries."""
        request = seq.request
        if request.first_token is None:
            request.first_token = time.time()
        output.scheduled, output.first_token = request.scheduled, request.first_token
        if seq.index == 0 and request.params.prompt_logprobs is not None and not request.prompt_sent:
            output.prompt_logprobs = request.prompt_logprobs
            request.prompt_logprobs = []
            request.prompt_sent = True

    # ends -------------------------------------------------------------------------------------------------------------

    def _finish_all(self, seqs: Iterable[Sequence]) -> None:
        for seq in list(seqs):
            if seq.status is Status.FINISHED:
                continue
            self._scheduler.finish(seq)
            seq.request.unfinished -= 1
            if not seq.request.unfinished:
                del self._requests[seq.request.id]
                if seq.request.adapter is not None:
                    self.adapters.leave(seq.request.adapter)

    def _fail(self, requests: Iterable[Request], text: str, distrusted: bool = False) -> list[SequenceOutput]:
        """End ``requests``. What is ``distrusted``, since it gave NaN, must not reach others by a prefix hit."""
        outputs: list[SequenceOutput] = []
        for request in requests:
            ended = [s for s in request.sequences if s.status is not Status.FINISHED]
            if distrusted and self._blocks.cache is not None:
                for seq in ended:
                    self._blocks.cache.forget(seq.blocks)
                    if self._offload is not None:
                        self._offload.forget(seq.keys)
            self._finish_all(ended)
            where = request.fault_field
            outputs += [
                SequenceOutput(
                    request_id=request.id, index=s.index, finish_reason="error", error=text, error_field=where
                )
                for s in ended
            ]
        return outputs

    def _drop_late(self) -> list[SequenceOutput]:
        """End requests whose deadline has passed while no step had begun with them."""
        outputs: list[SequenceOutput] = []
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, name = heappop(self._deadlines)
            request = self._requests.get(name)
            if request is None or request.scheduled is not None or request.sequences[0].key[1] != number:
                continue
            self._grammars.abort(name, None)
            self._finish_all(request.sequences)
            outputs += [SequenceOutput(request_id=name, index=s.index, finish_reason="late") for s in request.sequences]
        self._idle_check()
        return outputs

    # distributions ----------------------------------------------------------------------------------------------------

    def token_logits(self, token_ids: Items[int], start: int = 0) -> Iterator[torch.Tensor]:
        """The model's distributions after the tokens of one sequence: see ``qiao.engine.scoring``.

        The engine must be idle until the iterator is closed. Raises ``OverloadedError``
        where it is not idle, ``ParameterError``, ``PromptTooLongError``, and ``KernelError`` when an operator fails.
        """
        if self._requests:
            raise OverloadedError("distributions need an idle engine; wait until all requests have ended")
        if not token_ids or not 0 <= start < len(token_ids):
            raise ParameterError("start", f"must be a position of the {len(token_ids)} tokens, got {start}")
        if len(token_ids) > self.config.capacity:
            raise PromptTooLongError(f"{len(token_ids)} tokens do not fit the context of {self.config.capacity}")
        if not all(0 <= token < self.config.vocab_size for token in token_ids):
            raise ParameterError("token_ids", f"must be ids of the vocabulary of {self.config.vocab_size}")
        return self._token_logits(np.array(token_ids, np.int64), start)

    def _token_logits(self, tokens: Int64, start: int) -> Iterator[torch.Tensor]:
        blocks = self._blocks.allocate(self._blocks.blocks_for(len(tokens)))
        try:
            chunk = self.config.max_num_batched_tokens
            yield from token_logits(self._runner, blocks, tokens, start, chunk)
        except Exception as error:
            raise KernelError(_describe(error, self._ops)) from error
        finally:
            self._blocks.release(blocks)

    def _idle_check(self) -> None:
        if self.config.check_integrity and not self._requests:
            self.check_integrity()

    # state ------------------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Totals so far and the state of this moment."""
        totals, scheduler = self._totals, self._scheduler
        totals.running = len(scheduler.running)
        totals.waiting = len(scheduler.waiting)
        totals.waiting_by_class = scheduler.waiting.by_class()
        totals.kv_blocks_used = self._blocks.used
        totals.prefix_queries = scheduler.prefix_queries
        totals.prefix_hits = scheduler.prefix_hits
        totals.preemptions = scheduler.num_preemptions
        totals.prompt_budget = None if scheduler.pacer is None else scheduler.pacer.allowed
        if self._ops.utilization is not None:
            totals.utilization = self._ops.utilization(self._ops.device)
        totals.captured_steps, totals.not_captured = self._runner.captured.steps, self._runner.captured.refusal
        counts = self._draft_counts
        totals.drafts, totals.draft_tokens, totals.accepted_tokens = counts.drafts, counts.tokens, counts.accepted
        totals.accepted_per_position = list(counts.per_position)
        if self._offload is not None:
            totals.offload = self._offload.stats()
        totals.residency = None if self._blocks.residency is None else deepcopy(self._blocks.residency.stats)
        totals.work = None if self._work is None else copy(self._work.stats)
        totals.fallbacks = list(self._fallback_counts())
        if self._adapters is not None:
            totals.running_adapters = names_of(scheduler.running)
            totals.waiting_adapters = names_of(scheduler.waiting.items)
        return copy(totals)

    def check_integrity(self) -> None:
        """Compare blocks, references and rows; when idle also that none is in use. Raises ``IntegrityError``."""
        check_scheduler(self._scheduler)

    @property
    def adapters(self) -> AdapterPool:
        """The LoRA adapters. Raises ``ParameterError`` where they are not enabled."""
        if self._adapters is None:
            raise ParameterError("lora_request", NOT_ENABLED)
        return self._adapters

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, those kept beside the device too; running sequences keep their blocks."""
        self._blocks.forget()
        if self._offload is not None:
            self._offload.clear()


def _describe(error: Exception, ops: OpTable) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"out of memory during a step: {error}; lower --max-num-batched-tokens, --max-num-seqs or "
            "--gpu-memory-utilization"
        )
    if isinstance(error, QiaoError):
        return str(error)
    operator = operator_of(ops, error)
    what = "the model" if operator is None else f"operator {operator} on {ops.device}"
    return f"{what} failed during a step: {type(error).__name__}: {error}"
