"""Drafts from a smaller model with the same vocabulary.

Its caches have the blocks of the large model's: a block holds the same tokens in both, so tables, prefix hits, forks
and preemption are one and the same for both. Where the small model's part of a block was never written, as where a
sequence decoded without drafts, its guesses are bad, and that is all.

It draws with the random numbers that the large model will draw with, and by the same rules, so that two distributions
that are alike agree in most tokens, and a grammar is followed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from qiao.contract import KVCache
from qiao.engine.batch import Batch, decode_batch, place, ragged_batch
from qiao.engine.config import EngineConfig
from qiao.engine.drafting import DraftParts
from qiao.engine.rows import RowTable
from qiao.engine.runner import Runner
from qiao.engine.sampler import Sampler
from qiao.engine.scheduler import Step
from qiao.engine.sequence import Sequence


class DraftModel:
    """A drafter (``qiao.engine.drafting``).

    ``sampler`` is the large model's. Raises ``torch.OutOfMemoryError`` where the caches do not fit.
    """

    def __init__(self, parts: DraftParts, config: EngineConfig, rows: RowTable, sampler: Sampler) -> None:
        self.most_running = config.most_drafting
        self._tokens = config.num_speculative_tokens
        self._chunk = config.max_num_batched_tokens
        self._rows = rows
        self._runner = Runner(parts.model, parts.ops, replace(config, dtype=parts.cache_dtype), rows, sampler)

    @property
    def caches(self) -> list[KVCache]:
        """The small model's KV caches."""
        return self._runner.caches

    def draft(self, seq: Sequence, most: int) -> list[int]:
        """Places, to be filled once the sequence has blocks for them."""
        return [0] * min(most, self._tokens)

    def complete(self, step: Step) -> None:
        """Run the small model once for each place, over all sequences that still have one."""
        seqs = [seq for seq in step.seqs if seq.draft]
        self._catch_up(seqs)
        for place_number in range(max((len(seq.draft) for seq in seqs), default=0)):
            live = [seq for seq in seqs if len(seq.draft) > place_number]
            ahead = [seq.draft[:place_number] for seq in live]
            logits = self._runner.ops.stage_logits(self._logits(live, ahead))
            ids, _ = self._runner.sampler.draw(logits, self._rows.of(live, len(live)), ahead)
            for seq, token in zip(live, ids.tolist(), strict=True):
                seq.draft[place_number] = max(token, 0)  # no token could be drawn: any guess will do
                seq.num_drafted = seq.num_computed + 1 + place_number

    def follow(self, step: Step, batch: Batch) -> None:
        """Compute the prompts of ``step`` too, and copy the blocks of those that part."""
        prompts = (seq.num_computed + 1 < len(seq.tokens) for seq in step.seqs)
        if batch.decode or not (step.forks or any(prompts)):
            return
        self._runner.hidden(batch)
        if step.copies:
            self._runner.copy(step.copies)
        forks = dict(step.forks)
        for i, (seq, count) in enumerate(zip(step.seqs, step.counts, strict=True)):
            for one in (seq, *forks.get(i, ())):
                one.num_drafted = seq.num_computed + count

    def _catch_up(self, seqs: list[Sequence]) -> None:
        """Leave no more to compute for the first guess than a step may hold."""
        for seq in seqs:
            start = min(seq.num_drafted, seq.num_computed)
            while len(seq.tokens) - start > self._chunk:
                self._runner.hidden(self._ragged([seq], [seq.tokens[start : start + self._chunk]], [start]))
                start += self._chunk
            seq.num_drafted = start

    def _logits(self, seqs: list[Sequence], ahead: list[list[int]]) -> torch.Tensor:
        """Logits [B, V] behind ``ahead``, of which all but the last token has been computed."""
        if ahead[0]:
            starts = [seq.num_computed + len(draft) for seq, draft in zip(seqs, ahead, strict=True)]
            tokens = [draft[-1:] for draft in ahead]
        else:
            starts = [seq.num_drafted for seq in seqs]
            tokens = [seq.tokens[start:] for seq, start in zip(seqs, starts, strict=True)]
        runner = self._runner
        if all(len(part) == 1 for part in tokens):
            batch = self._decodes(seqs, tokens, starts)
            found = runner.captured.run(batch)
            return found.logits if found is not None else runner.model.logits(runner.hidden(batch))
        batch = self._ragged(seqs, tokens, starts)
        last = place(batch.query_start[1:].astype(np.int64) - 1, runner.ops.device)
        return runner.model.logits(runner.hidden(batch).index_select(0, last))

    def _decodes(self, seqs: list[Sequence], tokens: list[list[int]], starts: list[int]) -> Batch:
        ids = np.fromiter(chain.from_iterable(tokens), np.int64, len(seqs))
        rows = self._rows.of(seqs, len(seqs))
        return decode_batch(seqs, ids, np.array(starts, np.int64), rows, self._rows, self._runner.block_size)

    def _ragged(self, seqs: list[Sequence], tokens: list[list[int]], starts: list[int]) -> Batch:
        counts = np.array([len(part) for part in tokens], np.int64)
        ids = np.fromiter(chain.from_iterable(tokens), np.int64, int(counts.sum()))
        rows = self._rows.of(seqs, len(seqs))
        return ragged_batch(ids, np.array(starts, np.int64), counts, rows, self._rows, self._runner.block_size)
