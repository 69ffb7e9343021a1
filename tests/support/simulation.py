"""The scheduler with nothing computed: tokens are only counted, so that long competitions take little time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from qiao.engine.blocks import BlockManager
from qiao.engine.config import EngineConfig
from qiao.engine.integrity import check_scheduler
from qiao.engine.request import EngineRequest
from qiao.engine.rows import RowTable
from qiao.engine.scheduler import Scheduler
from qiao.engine.sequence import Request, Sequence
from qiao.sampling_params import SamplingParams


@dataclass
class Job:
    """One request and its times in steps; -1 is not yet."""

    tenant: str
    prompt: int
    answer: int
    arrived: int
    seq: Sequence
    started: int = -1
    first: int = -1
    ended: int = -1


@dataclass
class Simulation:
    """One engine. ``tokens`` are those computed for each tenant, ``history`` their state after each step.

    The engine's books are checked every ``check_every`` steps.
    """

    config: EngineConfig
    check_every: int = 16
    step: int = 0
    jobs: list[Job] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    levels: Counter[int] = field(default_factory=Counter)
    history: list[Counter[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = BlockManager(self.config.num_blocks, self.config.block_size)
        self.rows = RowTable(self.config.max_num_seqs, self.config.max_blocks_per_seq)
        self.scheduler = Scheduler(self.config, self.blocks, self.rows, lambda seq: None)
        self._running: dict[Sequence, Job] = {}
        self._priorities: dict[Sequence, int] = {}

    def add(
        self,
        tenant: str,
        prompt: int,
        answer: int,
        *,
        weight: float = 1.0,
        priority: int = 0,
        kv_share: float | None = None,
    ) -> Job:
        """A request of so many tokens arrives now."""
        level = priority if self.config.scheduling_policy == "priority" else 0
        cap = None if kv_share is None else self.config.capped_blocks(kv_share)
        account = self.scheduler.shares.account(tenant, weight, cap)
        source = EngineRequest(
            request_id=str(len(self.jobs)),
            prompt_token_ids=[1] * prompt,
            params=SamplingParams(max_tokens=answer),
            arrival=0.0,
        )
        request = Request(source, account)
        seq = Sequence(request, 0, source, (level, len(self.jobs), 0), prompt + answer, 0)
        request.sequences = [seq]
        self.scheduler.enter(request)
        self.scheduler.add(seq)
        job = Job(tenant, prompt, answer, self.step, seq)
        self.jobs.append(job)
        self._running[seq] = job
        self._priorities[seq] = level
        return job

    def run(self, steps: int = 1) -> None:
        """Some steps."""
        for _ in range(steps):
            if self.scheduler.has_work:
                self._run_step()
            if self.step % self.check_every == 0:
                check_scheduler(self.scheduler)
            self.step += 1
            self.history.append(Counter(self.tokens))

    def _run_step(self) -> None:
        step = self.scheduler.schedule()
        assert step.seqs, "nothing was scheduled although there is work"
        assert step.num_tokens <= self.config.max_num_batched_tokens
        assert len(step.seqs) <= self.config.max_num_seqs
        for seq, count in zip(step.seqs, step.counts, strict=True):
            job = self._running[seq]
            assert 0 < count <= len(seq.tokens) - seq.num_computed
            seq.num_computed += count
            self.tokens[job.tenant] += count
            self.levels[self._priorities[seq]] += count
            if job.started < 0:
                job.started = self.step
            if seq.num_computed == len(seq.tokens):
                seq.tokens.append(1)
                if job.first < 0:
                    job.first = self.step
                if len(seq.tokens) >= seq.limit:
                    job.ended = self.step
                    self.scheduler.finish(seq)
                    del self._running[seq]
