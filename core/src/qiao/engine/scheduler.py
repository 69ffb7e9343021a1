"""Which sequences compute how many tokens in the next step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from qiao.engine.blocks import BlockManager
from qiao.engine.config import EngineConfig
from qiao.engine.drafting import Drafter
from qiao.engine.fairness import CREDIT_STEPS, PROMOTED, Account, Displacement, Floor, Shares, loses_first, rank
from qiao.engine.offloading import Offload
from qiao.engine.pacing import Pacer
from qiao.engine.prefix import BlockKey
from qiao.engine.rows import RowTable
from qiao.engine.sequence import Request, Sequence, Status
from qiao.engine.tiers import Content
from qiao.engine.waiting import WaitingQueue


@dataclass(slots=True)
class Step:
    """``counts[i]`` new tokens of ``seqs[i]``, decodes first.

    ``forks`` are siblings that take over the prompt computed by ``seqs[i]`` in this step, as (i, siblings).
    ``copies`` are blocks to copy once the step has written them, as (source, target). ``drafted`` says that some of
    ``seqs`` compute drafts behind their last token.
    """

    seqs: list[Sequence]
    counts: list[int]
    forks: list[tuple[int, list[Sequence]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    drafted: bool = False

    @property
    def num_decodes(self) -> int:
        """Sequences that feed back the token they made last; the rest is prompts and what was preempted."""
        return sum(s.num_computed + 1 == len(s.tokens) for s in self.seqs)

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return sum(self.counts)


def _is_prompt(seq: Sequence) -> bool:
    """Whether the running ``seq`` has more to compute than its newest token, or siblings that wait for that."""
    return len(seq.tokens) - seq.num_computed > 1 or not seq.request.forked


class Scheduler:
    """Continuous batching within a token, a row and a block budget.

    Each step serves running decodes first (so that a long prompt never stalls them), then prompts: those that run and
    those that wait, by priority, then by their tenant's turn (see ``qiao.engine.fairness``), the running ones first
    where these are equal. ``pacer`` may limit the prompts' tokens for the decodes' sake. Who cannot start for lack of
    rows or blocks may displace a running sequence of a worse priority, or of a tenant that has more than its share.
    Where blocks run out, ``loses_first`` says who is preempted: it loses its blocks and computes its tokens again
    later. A sequence that waited long is promoted; the first of those is never preempted, and one sequence always fits
    the cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        rows: RowTable,
        joined: Callable[[Sequence], None],
        drafter: Drafter | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.rows = rows
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.shares = Shares(CREDIT_STEPS * config.max_num_batched_tokens)
        self.floor = Floor(config.priority_floor)
        self.pacer = None if config.tpot_target is None else Pacer(config.tpot_target)
        self._joined = joined
        self._drafter = drafter
        self._offload = offload
        self._drafted = False
        self._step = 0
        self._budget = 0
        self._scheduled: dict[Sequence, int] = {}
        self._levels = config.scheduling_policy == "priority"
        self._starved = False
        self._adapters_full = False
        self._displaced: set[Sequence] = set()
        self._watermark = max(1, config.num_blocks // 100)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to schedule."""
        return bool(self.running) or bool(self.waiting)

    def enter(self, request: Request) -> None:
        """A new request is known, and counts as its tenant's; ``add`` follows once it may start."""
        first = request.sequences[0]
        prompts = filter(_is_prompt, self.running)
        rivals = (seq.request.account for seq in (*self.waiting.heads, *prompts) if seq.key[0] == first.key[0])
        self.shares.enter(request.account, len(request.sequences), len(first.tokens), rivals)

    def add(self, seq: Sequence) -> None:
        """Let the first sequence of a new request wait."""
        self.waiting.push(seq, self._step)

    def schedule(self) -> Step:
        """Decide the next step; empty only where there is no work."""
        self._step += 1
        self._budget = self.config.max_num_batched_tokens
        self._scheduled = {}
        self._starved = False
        self._drafted = False
        self._adapters_full = False
        self._displaced = set()
        if self.waiting:
            self._promote()
        prompts = self._schedule_decodes()
        if self.pacer is not None:
            self._budget = self.pacer.chunk(len(self._scheduled), self._budget)
        self._schedule_prompts(prompts)
        if self._levels:
            self.floor.note(self._scheduled, self.waiting.worst_level)
        step = Step(list(self._scheduled), list(self._scheduled.values()), drafted=self._drafted)
        self._fork(step)
        return step

    def _promote(self) -> None:
        self.waiting.promote_overdue(self._step)
        heads = self.waiting.heads
        if not heads or any(seq.key[0] == PROMOTED for seq in heads):
            return
        candidate = self.floor.candidate(heads, min(seq.key[0] for seq in (*heads, *self._unpromoted())))
        if candidate is not None:
            self.waiting.promote(candidate)

    def _unpromoted(self) -> Iterator[Sequence]:
        return (seq for seq in self.running if seq.key[0] != PROMOTED)

    def finish(self, seq: Sequence) -> None:
        """Take ``seq`` out, wherever it is, and drop its references."""
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
            if self._offload is not None:
                self._offload.leave(seq)
        elif seq.status is Status.RUNNING:
            self.running.remove(seq)
        if seq.row >= 0:
            self._release(seq)
        seq.status = Status.FINISHED
        self.shares.leave(seq.request.account)
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

    def _schedule_decodes(self) -> list[Sequence]:
        """A token for each running answer; returns the running prompts."""
        prompts: list[Sequence] = []
        decodes: list[Sequence] = []
        for seq in self.running:
            (prompts if _is_prompt(seq) else decodes).append(seq)
        if len(decodes) > self._budget and self.shares.competing:
            decodes.sort(key=lambda seq: (rank(seq), seq.key))
        block_size = self.config.block_size
        drafter = self._drafter if self._drafter is None or len(decodes) <= self._drafter.most_running else None
        left = len(decodes)
        for seq in decodes:
            left -= 1
            if self._budget <= 0:
                break
            if seq.row >= 0 and (len(seq.blocks) * block_size > seq.num_computed or self._make_room(seq, 1)):
                more = self._draft(seq, drafter, left) if drafter is not None else 0
                self._take(seq, 1 + more)
        return prompts

    def _draft(self, seq: Sequence, drafter: Drafter, left: int) -> int:
        """Let ``seq`` guess ahead, as far as the budget of the ``left`` other decodes and blocks that are to spare
        allow: nobody is put back for a guess.
        """
        spare, account = self.blocks.available - len(self.running) - self._watermark, seq.request.account
        if account.cap is not None:
            spare = min(spare, account.cap - account.blocks)
        room = (len(seq.blocks) + max(0, spare)) * self.config.block_size - seq.num_computed - 1
        most = min(room, seq.limit - len(seq.tokens) - 1, self._budget - 1 - left)
        if most <= 0:
            return 0
        seq.draft = drafter.draft(seq, most)
        if not seq.draft:
            return 0
        self._drafted = True
        needed = self.blocks.blocks_for(seq.num_computed + 1 + len(seq.draft)) - len(seq.blocks)
        if needed > 0:
            self._hold(seq, self.blocks.allocate(needed), extend=True)
        return len(seq.draft)

    def _schedule_prompts(self, prompts: list[Sequence]) -> None:
        capped: set[Account] = set()  # tenants that start nothing in this step, and are no reason to stop either
        admitting = True
        while self._budget > 0:
            running = min(prompts, key=lambda seq: (rank(seq), seq.key), default=None)
            waiting = self.waiting.next(capped, self._adapters_full) if admitting and not self._starved else None
            if waiting is not None and self._lacks_adapter(waiting):
                continue
            if waiting is not None and (running is None or rank(waiting) < rank(running)):
                if self._over_cap(waiting) or not self._readable(waiting):
                    capped.add(waiting.request.account)
                else:
                    admitting = self._admit(waiting)
            elif running is not None:
                prompts.remove(running)
                count = self._chunk(len(running.tokens) - running.num_computed)
                if running.row >= 0 and count > 0 and self._make_room(running, count):
                    self._take_prompt(running, count)
            else:
                return

    def _take_prompt(self, seq: Sequence, count: int) -> None:
        self.shares.serves(seq.request.account)
        self._take(seq, count)

    def _take(self, seq: Sequence, count: int) -> None:
        self._scheduled[seq] = count
        self._budget -= count
        seq.request.account.charge(count)

    def _chunk(self, pending: int) -> int:
        """Tokens of a prompt that this step can take, 0 where none."""
        if not self.config.enable_chunked_prefill:
            return pending if pending <= self._budget else 0
        limit = self._budget
        if self.config.long_prefill_token_threshold:
            limit = min(limit, self.config.long_prefill_token_threshold)
        return min(pending, limit)

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Give ``seq`` blocks for ``count`` more tokens, preempting who loses first; False where that is ``seq``."""
        needed = self.blocks.blocks_for(seq.num_computed + count) - len(seq.blocks)
        if needed <= 0:
            return True
        while (victim := self._victim(seq, needed)) is not None:
            self._starved = True
            self._preempt(victim)
            if victim is seq:
                return False
        self._hold(seq, self.blocks.allocate(needed), extend=True)
        return True

    def _victim(self, seq: Sequence, needed: int) -> Sequence | None:
        """Who has to go for ``seq`` to get ``needed`` blocks; None once there is room."""
        account = seq.request.account
        if account.cap is not None and account.blocks + needed > account.cap:
            own = [one for one in self.running if one.request.account is account]
            if len(own) > 1:
                return own[-1]
        if needed <= self.blocks.available:
            return None
        return max(self.running, key=loses_first) if self.shares.competing else self.running[-1]

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        unused = self._scheduled.pop(seq, 0)
        self._budget += unused
        seq.request.account.charge(-unused)
        if not seq.request.forked:
            self._drop_reserved(seq)
        self._release(seq)
        seq.num_computed = 0
        seq.draft = []
        self.num_preemptions += 1
        self.waiting.push(seq, self._step)

    def _release(self, seq: Sequence) -> None:
        self._give_row_back(seq)
        self.blocks.release(seq.blocks)
        seq.request.account.blocks -= len(seq.blocks)
        seq.blocks = []

    def _hold(self, seq: Sequence, blocks: list[int], extend: bool = False) -> None:
        """``seq`` has more blocks; where its row has been written, in its row too."""
        seq.request.account.blocks += len(blocks)
        if extend:
            self.rows.extend(seq, blocks)
        else:
            seq.blocks += blocks

    def _give_row_back(self, seq: Sequence) -> None:
        self.rows.give_back(seq)
        seq.request.account.rows -= 1

    def _drop_reserved(self, seq: Sequence) -> None:
        """Free the rows kept for siblings that have not started."""
        for sibling in seq.request.sequences[1:]:
            if sibling.row >= 0:
                self._give_row_back(sibling)

    # waiting ----------------------------------------------------------------------------------------------------------

    def _over_cap(self, seq: Sequence) -> bool:
        """Whether ``seq`` has to wait until its own tenant gives blocks back."""
        account = seq.request.account
        needed = self.blocks.blocks_for(len(seq.tokens))
        return account.cap is not None and account.blocks > 0 and account.blocks + needed > account.cap

    def _lacks_adapter(self, seq: Sequence) -> bool:
        """Whether ``seq``, who is next, has to wait until another LoRA adapter is out of use.

        Once one waits, nobody else starts with an adapter in this step, whichever it is: else requests that keep coming
        for the running ones would keep it waiting for ever.
        """
        if seq.request.adapter is not None:
            running = {one.request.adapter for one in self.running if one.request.adapter is not None}
            self._adapters_full = seq.request.adapter not in running and len(running) >= self.config.max_loras
        return self._adapters_full and seq.request.adapter is not None

    def _readable(self, seq: Sequence) -> bool:
        """Whether the blocks of ``seq`` that are kept in files have been read. Where nobody runs it waits for that."""
        if self._offload is None or self._offload.disk is None:
            return True
        keys = self._findable_keys(seq)
        hits = [] if self.blocks.cache is None else self.blocks.cache.match(keys)
        return self._offload.ready(keys[len(hits) :], not self.running, seq)

    def _admit(self, seq: Sequence) -> bool:
        """Start the waiting ``seq``; False where there is no room for it."""
        wanted = [seq] if seq.request.forked else self._unfinished(seq)
        keys = self._findable_keys(seq)
        hits = [] if self.blocks.cache is None else self.blocks.cache.match(keys)
        kept = keys[len(hits) :] if self._offload is not None else []
        if self._offload is not None and kept:
            kept = kept[: self._offload.look_up(kept)]
        count = self._chunk(len(seq.tokens) - (len(hits) + len(kept)) * self.config.block_size)
        if count == 0 or seq in self._displaced:
            return False
        if not self._has_room(seq, wanted, hits) and not self._displace(seq, wanted, hits):
            return False
        contents = self._offload.load(kept) if self._offload is not None and kept else []
        cached = (len(hits) + len(contents)) * self.config.block_size
        count = self._chunk(len(seq.tokens) - cached)
        if count == 0:  # a content was damaged, and what is left does not fit this step
            return False
        self.waiting.pop(seq, self._step)
        for member in wanted:
            self.rows.take(member)
        seq.request.account.rows += len(wanted)
        self._start(seq, hits, contents, count)
        self._take_prompt(seq, count)
        return True

    def _has_room(self, seq: Sequence, wanted: list[Sequence], hits: list[int]) -> bool:
        """Whether there are rows, and blocks for all tokens of ``seq``: starting on less would only preempt soon."""
        if len(wanted) > self.rows.num_free or (self.running and self.blocks.available <= self._watermark):
            return False
        return self._needed(seq, hits) <= self.blocks.available

    def _needed(self, seq: Sequence, hits: list[int]) -> int:
        needed = self.blocks.blocks_for(len(seq.tokens)) - len(hits) + self.blocks.unreferenced(hits)
        return needed + self._watermark if self.running else needed

    def _displace(self, seq: Sequence, wanted: list[Sequence], hits: list[int]) -> bool:
        """Preempt enough others for ``seq`` to start, if it may; else nobody."""
        if not self.running or not (self.running[-1].key[0] > seq.key[0] or self.shares.competing):
            return False
        rows = len(wanted) - self.rows.num_free
        blocks = max(self._needed(seq, hits), self._watermark + 1) - self.blocks.available
        held = self.blocks.blocks_for(len(seq.tokens))
        search = Displacement(seq, rows, blocks, len(wanted), held)
        for victim in search.victims(self.running, self.blocks.references):
            self._displaced.add(victim)
            self._preempt(victim)
        return self._has_room(seq, wanted, hits)

    @staticmethod
    def _unfinished(seq: Sequence) -> list[Sequence]:
        return [s for s in seq.request.sequences if s.status is not Status.FINISHED]

    def _findable_keys(self, seq: Sequence) -> list[BlockKey]:
        """Keys of the blocks of ``seq`` that may be found. The last token is always computed: its logits are needed."""
        if self.blocks.cache is None or (seq.index == 0 and seq.request.needs_whole_prompt):
            return []
        full = (len(seq.tokens) - 1) // self.config.block_size
        return seq.keys_up_to(full, self.config.block_size)

    def _start(self, seq: Sequence, hits: list[int], contents: list[Content], count: int) -> None:
        self.blocks.share(hits)
        known = len(hits) + len(contents)
        cached = known * self.config.block_size
        self._hold(seq, hits + self.blocks.allocate(self.blocks.blocks_for(cached + count) - len(hits)))
        if self._offload is not None and contents:
            self._offload.restore(seq.blocks[len(hits) : known], contents)
            assert self.blocks.cache is not None
            for i in range(len(hits), known):
                self.blocks.cache.register(seq.blocks[i], seq.keys[i])
        seq.num_computed = seq.num_drafted = cached
        seq.num_registered = known
        seq.num_restored = len(contents) * self.config.block_size
        if self._offload is not None:  # those of a preempted sequence too, as its hits
            self._offload.queries += len(seq.tokens) - len(hits) * self.config.block_size
        if not seq.counted:
            self.prefix_queries += len(seq.tokens)
            self.prefix_hits += len(hits) * self.config.block_size
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
                    self._give_row_back(sibling)
                    self.waiting.push(sibling, self._step)
                    continue
                self.blocks.share(seq.blocks[:full])
                self._hold(sibling, seq.blocks[:full])
                if rest:
                    self._hold(sibling, self.blocks.allocate(1))
                    step.copies.append((seq.blocks[full], sibling.blocks[full]))
                sibling.num_computed = len(seq.tokens)
                sibling.num_registered = full
                sibling.counted = True
                self._run(sibling)
                started.append(sibling)
            step.forks.append((i, started))
