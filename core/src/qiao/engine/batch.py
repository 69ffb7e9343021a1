"""The tensors of one step, gathered from the persistent rows with numpy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qiao.contract import AttentionMetadata
from qiao.engine.rows import Int32, Int64, RowTable
from qiao.engine.scheduler import Step
from qiao.engine.sequence import Sequence


def place(array: npt.NDArray[Any], device: str) -> torch.Tensor:
    """``array`` as a tensor on ``device``: one copy, or none where that is the host."""
    tensor = torch.from_numpy(array)
    return tensor if device == "cpu" else tensor.to(device)


@dataclass(slots=True)
class Batch:
    """One step on the host. Letters as in ``qiao.contract.types``.

    ``rows`` [B] are the sequences' places in the row table, ``counts`` [B] their new tokens. ``sampled`` are the N
    sequences that get a token, ``sampled_rows`` [N] their places, ``logits_index`` [N] the packed position whose
    logits each uses. ``decode`` says that each sequence computes its last token and samples the next one, and no more;
    ``room`` is how many further decode steps of the same sequences need no further block. ``takes_best`` is
    ``Sampler.takes_best`` of ``sampled_rows``, once somebody has asked. ``drafts`` [N] are those of ``sampled``, each
    of which then has as many more entries in ``logits_index``; None where there are none.
    """

    rows: Int64
    counts: Int64
    token_ids: Int64
    positions: Int64
    query_start: Int32
    seq_lens: Int32
    block_tables: Int32
    slot_mapping: Int64
    sampled: list[Sequence]
    sampled_rows: Int64
    logits_index: Int64
    decode: bool
    room: int = 0
    takes_best: bool | None = None
    drafts: list[list[int]] | None = None

    def goes_on(self, step: Step) -> bool:
        """Whether ``step``, the next one after this decode batch, is the same one token further, in the same blocks.

        Rows and blocks are the same as long as the sequences are: whoever was preempted was missing in between.
        """
        return self.room > 0 and not step.drafted and step.seqs == self.sampled

    def last_tokens(self) -> list[int]:
        """The token that each sequence feeds next."""
        return [seq.tokens[-1] for seq in self.sampled]

    def metadata(self, device: str) -> AttentionMetadata:
        """The attention metadata on ``device``."""
        return AttentionMetadata(
            query_start=place(self.query_start, device),
            seq_lens=place(self.seq_lens, device),
            block_tables=place(self.block_tables, device),
            slot_mapping=place(self.slot_mapping, device),
            query_lens=tuple(self.counts.tolist()),
            kv_lens=tuple(self.seq_lens.tolist()),
        )


def build_batch(step: Step, table: RowTable, block_size: int) -> Batch:
    """Gather the batch of ``step``; sequence i is row i of every [B] array."""
    seqs = step.seqs
    rows = table.of(seqs, len(seqs))
    assert rows.min() >= 0, "a sequence without a row would write into another's blocks"
    start = np.fromiter((s.num_computed for s in seqs), np.int64, len(seqs))
    if not step.forks and not step.drafted and all(s.num_computed + 1 == len(s.tokens) < s.limit for s in seqs):
        last = np.fromiter((s.tokens[-1] for s in seqs), np.int64, len(seqs))
        return decode_batch(seqs, last, start, rows, table, block_size)
    counts = np.array(step.counts, np.int64)
    batch = ragged_batch(_token_ids(step), start, counts, rows, table, block_size)
    batch.sampled, batch.logits_index = _sampled(step, batch.query_start)
    batch.sampled_rows = table.of(batch.sampled, len(batch.sampled))
    batch.drafts = [seq.draft for seq in batch.sampled] if step.drafted else None
    return batch


def ragged_batch(token_ids: Int64, start: Int64, counts: Int64, rows: Int64, table: RowTable, block_size: int) -> Batch:
    """``counts`` [B] packed ``token_ids`` [T] of the sequences at ``rows`` [B], from positions ``start`` [B] on.

    Nothing is sampled from it.
    """
    ends = start + counts
    query_start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    token_rows = np.repeat(rows, counts)
    positions = np.arange(query_start[-1]) + np.repeat(start - query_start[:-1], counts)
    block, offset = np.divmod(positions, block_size)
    slots = table.block_tables[token_rows, block] * np.int64(block_size) + offset
    width = -(-int(ends.max()) // block_size)
    return Batch(
        rows=rows,
        counts=counts,
        token_ids=token_ids,
        positions=positions,
        query_start=query_start.astype(np.int32),
        seq_lens=ends.astype(np.int32),
        block_tables=table.block_tables[rows, :width],
        slot_mapping=slots,
        sampled=[],
        sampled_rows=rows[:0],
        logits_index=rows[:0],
        decode=False,
    )


def decode_batch(
    seqs: list[Sequence], token_ids: Int64, positions: Int64, rows: Int64, table: RowTable, block_size: int
) -> Batch:
    """One token [B] at ``positions`` [B] of each of ``seqs``, which all sample: the step that has to be quick."""
    count = len(rows)
    block = positions // block_size
    offset = positions - block * block_size
    return Batch(
        rows=rows,
        counts=table.ones[:count],
        token_ids=token_ids,
        positions=positions,
        query_start=table.numbers[: count + 1],
        seq_lens=(positions + 1).astype(np.int32),
        block_tables=table.block_tables[rows, : int(block.max()) + 1],
        slot_mapping=table.block_tables[rows, block] * np.int64(block_size) + offset,
        sampled=seqs,
        sampled_rows=rows,
        logits_index=table.numbers[:count].astype(np.int64),
        decode=True,
        room=block_size - 1 - int(offset.max()),
    )


def _token_ids(step: Step) -> Int64:
    """The packed new tokens, drafts included."""
    pairs = zip(step.seqs, step.counts, strict=True)
    parts = [seq.tokens[seq.num_computed : seq.num_computed + n] + seq.draft for seq, n in pairs]
    return np.fromiter(chain.from_iterable(parts), np.int64, step.num_tokens)


def _sampled(step: Step, query_start: Int32) -> tuple[list[Sequence], Int64]:
    """Sequences whose tokens are complete after the step, forked siblings beside their leader."""
    chosen = [
        i
        for i, (seq, count) in enumerate(zip(step.seqs, step.counts, strict=True))
        if seq.num_computed + count - len(seq.draft) == len(seq.tokens) < seq.limit
    ]
    forks = dict(step.forks)
    if not forks and not step.drafted:
        return [step.seqs[i] for i in chosen], query_start[1:][chosen].astype(np.int64) - 1
    sampled: list[Sequence] = []
    index: list[int] = []
    for i in chosen:
        end = int(query_start[i + 1])
        for seq in (step.seqs[i], *forks.get(i, ())):
            sampled.append(seq)
            index += range(end - 1 - len(seq.draft), end)
    return sampled, np.array(index, np.int64)
