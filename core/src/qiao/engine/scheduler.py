"""Which sequences compute how many tokens in the next step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from qiao.engine.blocks import BlockManager
from qiao.engine.config import EngineConfig
from qiao.engine.pacing import Pacer
from qiao.engine.rows import RowTable
from qiao.engine.sequence import Sequence, Status
from qiao.engine.waiting import WaitingQueue


@dataclass(slots=True)
class Step:
    """``counts[i]`` new tokens of ``seqs[i]``, decodes first.

    ``forks`` are siblings that take over the prompt computed by ``seqs[i]`` in this step, as (i, siblings).
    ``copies`` are blocks to copy once the step has written them, as (source, target).
    """

    seqs: list[Sequence]
    counts: list[int]
    forks: list[tuple[int, list[Sequence]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_decodes(self) -> int:
        """Sequences that feed back the token they made last; the rest is prompts and what was preempted."""
        return sum(c == 1 and s.num_computed + 1 == len(s.tokens) for s, c in zip(self.seqs, self.counts, strict=True))

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return sum(self.counts)


class Scheduler:
    """Continuous batching within a token, a row and a block budget.

    Each step serves running decodes first (so that a long prompt never stalls them), then running prompts, then the
    waiting queue, each in order of service; ``pacer`` may limit the prompts' tokens for the decodes' sake. Where blocks
    run out, the running sequence that is last in that order is preempted: it loses its blocks and computes its tokens
    again later. Since the first in order is never preempted and one sequence always fits the cache, every step makes
    progress.
    """

    def __init__(
        self, config: EngineConfig, blocks: BlockManager, rows: RowTable, joined: Callable[[Sequence], None]
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.rows = rows
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.pacer = None if config.tpot_target is None else Pacer(config.tpot_target)
        self._joined = joined
        self._step = 0
        self._budget = 0
        self._scheduled: dict[Sequence, int] = {}
        self._watermark = max(1, config.num_blocks // 100)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to schedule."""
        return bool(self.running) or bool(self.waiting)

    def add(self, seq: Sequence) -> None:
        """Let a new sequence wait."""
        self.waiting.push(seq, self._step)

    def schedule(self) -> Step:
        """Decide the next step; empty only where there is no work."""
        self._step += 1
        self._budget = self.config.max_num_batched_tokens
        self._scheduled = {}
        self.waiting.promote(self._step)
        preemptions = self.num_preemptions
        self._schedule_running()
        if preemptions == self.num_preemptions:
            self._admit()
        step = Step(list(self._scheduled), list(self._scheduled.values()))
        self._fork(step)
        return step

    def finish(self, seq: Sequence) -> None:
        """Take ``seq`` out, wherever it is, and drop its references."""
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
        elif seq.status is Status.RUNNING:
            self.running.remove(seq)
        if seq.row >= 0:
            self._release(seq)
        seq.status = Status.FINISHED
        if seq is seq.request.sequences[0] and not seq.request.forked:
            self._let_go(seq)

    def _let_go(self, leader: Sequence) -> None:
        """The leader ends before its prompt is complete: the followers compute it for themselves."""
        leader.request.forked = True
        self._drop_reserved(leader)
        for sibling in leader.request.sequences[1:]:
            if sibling.status is Status.FOLLOWING:
                self.waiting.push(sibling, self._step)

    # running ----------------------------------------------------------------------------------------------------------

    def _schedule_running(self) -> None:
        prompts: list[Sequence] = []
        block_size = self.config.block_size
        for seq in self.running.copy():
            pending = len(seq.tokens) - seq.num_computed
            if pending > 1 or not seq.request.forked:
                prompts.append(seq)
            elif (
                seq.row >= 0
                and self._budget > 0
                and (len(seq.blocks) * block_size > seq.num_computed or self._make_room(seq, 1))
            ):
                self._scheduled[seq] = 1
                self._budget -= 1
        if self.pacer is not None:
            self._budget = self.pacer.chunk(len(self._scheduled), self._budget)
        for seq in prompts:
            if seq.row < 0:
                continue
            count = self._chunk(len(seq.tokens) - seq.num_computed)
            if count > 0 and self._make_room(seq, count):
                self._scheduled[seq] = count
                self._budget -= count

    def _chunk(self, pending: int) -> int:
        """Tokens of a prompt that this step can take, 0 where none."""
        if not self.config.enable_chunked_prefill:
            return pending if pending <= self._budget else 0
        limit = self._budget
        if self.config.long_prefill_token_threshold:
            limit = min(limit, self.config.long_prefill_token_threshold)
        return min(pending, limit)

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Give ``seq`` blocks for ``count`` more tokens, preempting whoever is last; False where that is ``seq``."""
        needed = self.blocks.blocks_for(seq.num_computed + count) - len(seq.blocks)
        if needed <= 0:
            return True
        while needed > self.blocks.available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        self.rows.extend(seq, self.blocks.allocate(needed))
        return True

    def _preempt(self, seq: Sequence) -> None:
        assert self.running[-1] is seq
        self.running.pop()
        self._budget += self._scheduled.pop(seq, 0)
        if not seq.request.forked:
            self._drop_reserved(seq)
        self._release(seq)
        seq.num_computed = 0
        self.num_preemptions += 1
        self.waiting.push(seq, self._step)

    def _release(self, seq: Sequence) -> None:
        self.rows.give_back(seq)
        self.blocks.release(seq.blocks)
        seq.blocks = []

    def _drop_reserved(self, seq: Sequence) -> None:
        """Free the rows kept for siblings that have not started."""
        for sibling in seq.request.sequences[1:]:
            if sibling.row >= 0:
                self.rows.give_back(sibling)

    # waiting ----------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.waiting and self._budget > 0:
            seq = self.waiting.peek()
            wanted = [seq] if seq.request.forked else self._unfinished(seq)
            if len(wanted) > self.rows.num_free or (self.running and self.blocks.available <= self._watermark):
                return
            hits = self._prefix_hit(seq)
            cached = len(hits) * self.config.block_size
            count = self._chunk(len(seq.tokens) - cached)
            if count == 0 or not self._fits(seq, hits):
                return
            self.waiting.pop(self._step)
            for member in wanted:
                self.rows.take(member)
            self._start(seq, hits, cached, count)
            self._scheduled[seq] = count
            self._budget -= count

    @staticmethod
    def _unfinished(seq: Sequence) -> list[Sequence]:
        return [s for s in seq.request.sequences if s.status is not Status.FINISHED]

    def _prefix_hit(self, seq: Sequence) -> list[int]:
        """Cached blocks at the start of ``seq``. The last token is always computed: its logits are needed."""
        cache = self.blocks.cache
        if cache is None or (seq.index == 0 and seq.request.needs_whole_prompt):
            return []
        full = (len(seq.tokens) - 1) // self.config.block_size
        return cache.match(seq.keys_up_to(full, self.config.block_size))

    def _fits(self, seq: Sequence, hits: list[int]) -> bool:
        """Whether all tokens of ``seq`` fit now: starting on less would only preempt others, or it, soon."""
        needed = self.blocks.blocks_for(len(seq.tokens)) - len(hits) + self.blocks.unreferenced(hits)
        if self.running:
            needed += self._watermark
        return needed <= self.blocks.available

    def _start(self, seq: Sequence, hits: list[int], cached: int, count: int) -> None:
        self.blocks.share(hits)
        new = self.blocks.blocks_for(cached + count) - len(hits)
        seq.blocks = hits + self.blocks.allocate(new)
        seq.num_computed = cached
        seq.num_registered = len(hits)
        if not seq.counted:
            self.prefix_queries += len(seq.tokens)
            self.prefix_hits += cached
            seq.request.cached_tokens += cached if seq.index == 0 else 0
            seq.counted = True
        self._run(seq)

    def _run(self, seq: Sequence) -> None:
        seq.status = Status.RUNNING
        insort(self.running, seq, key=lambda s: s.key)
        self.rows.start(seq)
        self._joined(seq)

    # n > 1 ------------------------------------------------------------------------------------------------------------

    def _fork(self, step: Step) -> None:
        """Where a step completes a prompt that siblings wait for, let them share its blocks.

        Full blocks are shared; a last block in part is copied after the step. A sibling that finds no block for its
        copy waits and computes the prompt itself.
        """
        for i, seq in enumerate(step.seqs):
            request = seq.request
            if request.forked or seq.num_computed + step.counts[i] < len(seq.tokens):
                continue
            request.forked = True
            full, rest = divmod(len(seq.tokens), self.config.block_size)
            started: list[Sequence] = []
            for sibling in request.sequences[1:]:
                if sibling.status is not Status.FOLLOWING:
                    continue
                if rest and not self.blocks.available:
                    self.rows.give_back(sibling)
                    self.waiting.push(sibling, self._step)
                    continue
                self.blocks.share(seq.blocks[:full])
                sibling.blocks = seq.blocks[:full]
                if rest:
                    sibling.blocks += self.blocks.allocate(1)
                    step.copies.append((seq.blocks[full], sibling.blocks[full]))
                sibling.num_computed = len(seq.tokens)
                sibling.num_registered = full
                sibling.counted = True
                self._run(sibling)
                started.append(sibling)
            step.forks.append((i, started))
