"""Runs one step: batch tensors, model, block copies, sampling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from qiao.contract import AttentionMetadata, KVCache
from qiao.engine.adapters import AdapterPool, number_of
from qiao.engine.batch import Batch, build_batch, place
from qiao.engine.capture import CapturedSteps
from qiao.engine.config import EngineConfig
from qiao.engine.logprobs import score_prompt
from qiao.engine.pooling import pool
from qiao.engine.rows import RowTable
from qiao.engine.sampler import Sampled, Sampler, take
from qiao.engine.scheduler import Step
from qiao.engine.sequence import Sequence
from qiao.models.base import Model
from qiao.optable import OpTable


class Runner:
    """Owns the KV caches of all layers and the sampler, unless that is another runner's.

    Raises ``torch.OutOfMemoryError`` where the caches do not fit the device.
    """

    def __init__(
        self,
        model: Model,
        ops: OpTable,
        config: EngineConfig,
        rows: RowTable,
        sampler: Sampler | None = None,
        adapters: AdapterPool | None = None,
    ) -> None:
        self.model = model
        self.ops = ops
        self._adapters = adapters
        self._config = config
        self._rows = rows
        self.sampler = sampler or Sampler(config.max_num_seqs, config.vocab_size, ops)
        self.caches: list[KVCache] = [
            ops.allocate_kv(
                config.num_blocks,
                config.block_size,
                kind.num_kv_heads,
                kind.head_dim,
                config.dtype,
                ops.kv_layout,
                ops.kv_device,
            )
            for kind in model.shape.attention
            for _ in range(kind.count)
        ]
        self.captured = CapturedSteps(model, ops, config, self.caches)
        heads = {(a.num_heads, a.num_kv_heads, a.head_dim) for a in model.shape.attention}
        self._plan_heads = heads.pop() if len(heads) == 1 else None

    def build(self, step: Step) -> Batch:
        """The batch of ``step`` on the host: the last one again where a program can go on with it."""
        last = self.captured.last
        if last is not None and last.goes_on(step):
            return last
        self.captured.last = None
        return build_batch(step, self._rows, self._config.block_size)

    def run(self, step: Step, batch: Batch) -> Sampled:
        """Compute ``batch``, write its keys and values, sample. Raises whatever the model or an operator raises."""
        adapted = batch is not self.captured.last and self._adapted(step)
        replays = batch is self.captured.last or (batch.decode and not adapted and not _scores_prompts(step))
        found = self.captured.run(batch) if replays else None
        if found is None:
            return self._run_adapted(step, batch) if adapted else self._run_eagerly(step, batch)
        if batch.takes_best is None:
            batch.takes_best = self.sampler.takes_best(batch.sampled_rows)
        if found.best is None or not batch.takes_best:
            return self._sample(found.logits, batch)
        return take(*found.best)

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, E] of ``batch``; writes the caches."""
        ops = self.ops
        token_ids, positions = place(batch.token_ids, ops.device), place(batch.positions, ops.device)
        return self.forward(token_ids, positions, batch.metadata(ops.kv_device))

    def _adapted(self, step: Step) -> bool:
        """Whether some sequence has an adapter, which recorded programs do not know of."""
        return self._adapters is not None and any(map(number_of, step.seqs))

    def _run_adapted(self, step: Step, batch: Batch) -> Sampled:
        assert self._adapters is not None
        self._adapters.choose(step)
        try:
            return self._run_eagerly(step, batch)
        finally:
            self._adapters.clear()

    def _run_eagerly(self, step: Step, batch: Batch) -> Sampled:
        ops, model = self.ops, self.model
        hidden = self.hidden(batch)
        if step.copies:
            self.copy(step.copies)
        for i, seq in enumerate(step.seqs):
            start = int(batch.query_start[i])
            if _scored(seq):
                score_prompt(seq, hidden[start : start + step.counts[i]], model, ops)
            if seq.request.pooling:
                pool(seq, hidden[start : start + step.counts[i]])
        if not batch.sampled:
            return Sampled([], None)
        index = place(batch.logits_index, ops.device)
        return self._sample(model.logits(hidden.index_select(0, index)), batch)

    def _sample(self, logits: torch.Tensor, batch: Batch) -> Sampled:
        staged = self.ops.stage_logits(logits)
        if batch.drafts is not None:
            return self.sampler.verify(staged, batch.sampled_rows, batch.drafts)
        return self.sampler.sample(staged, batch.sampled_rows)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Hidden states [T, E] of ``token_ids`` and ``positions`` [T] on the compute device; writes the caches."""
        return self.model.forward(token_ids, positions, self.caches, self._planned(metadata))

    @property
    def block_size(self) -> int:
        """Tokens in a block of the caches."""
        return self._config.block_size

    def _planned(self, metadata: AttentionMetadata) -> AttentionMetadata:
        prepare = self.ops.prepare_attention
        if prepare is None or self._plan_heads is None:
            return metadata
        return replace(metadata, plan=prepare(metadata, *self._plan_heads, self._config.block_size))

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks of all caches, as (source, target)."""
        pairs = np.array(copies, np.int64)
        source = place(np.ascontiguousarray(pairs[:, 0]), self.ops.kv_device)
        target = place(np.ascontiguousarray(pairs[:, 1]), self.ops.kv_device)
        for cache in self.caches:
            self.ops.copy_blocks(cache, source, target)


def _scored(seq: Sequence) -> bool:
    """Whether this step scores a part of the prompt of ``seq``."""
    return seq.index == 0 and seq.request.params.prompt_logprobs is not None and seq.request.wants_prompt_logprobs


def _scores_prompts(step: Step) -> bool:
    return any(_scored(seq) for seq in step.seqs)
