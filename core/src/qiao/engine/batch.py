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
    ``Sampler.takes_best`` of ``sampled_rows``, once somebody has asked.
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

    def goes_on(self, step: Step) -> bool:
        """Whether ``step``, the next one after this decode batch, is the same one token further, in the same blocks.

        Rows and blocks are the same as long as the sequences are: whoever was preempted was missing in between.
        """
        return self.room > 0 and step.seqs == self.sampled

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
    if not step.forks and all(s.num_computed + 1 == len(s.tokens) < s.limit for s in seqs):
        return _decode_batch(step, rows, table, block_size)
    counts = np.array(step.counts, np.int64)
    start = np.fromiter((s.num_computed for s in seqs), np.int64, len(seqs))
    ends = start + counts
    query_start = np.zeros(len(seqs) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    token_rows = np.repeat(rows, counts)
    positions = np.arange(query_start[-1]) + np.repeat(start - query_start[:-1], counts)
    token_ids = _token_ids(step)
    block, offset = np.divmod(positions, block_size)
    slots = table.block_tables[token_rows, block] * np.int64(block_size) + offset
    width = -(-int(ends.max()) // block_size)
    sampled, index = _sampled(step, query_start)
    return Batch(
        rows=rows,
        counts=counts,
        token_ids=token_ids,
        positions=positions,
        query_start=query_start.astype(np.int32),
        seq_lens=ends.astype(np.int32),
        block_tables=table.block_tables[rows, :width],
        slot_mapping=slots,
        sampled=sampled,
        sampled_rows=table.of(sampled, len(sampled)),
        logits_index=index,
        decode=False,
    )


def _decode_batch(step: Step, rows: Int64, table: RowTable, block_size: int) -> Batch:
    """As ``build_batch``, where each sequence computes its last token and samples: the step that has to be quick."""
    count = len(rows)
    seqs = step.seqs
    positions = np.fromiter((s.num_computed for s in seqs), np.int64, count)
    block = positions // block_size
    offset = positions - block * block_size
    return Batch(
        rows=rows,
        counts=table.ones[:count],
        token_ids=np.fromiter((s.tokens[-1] for s in seqs), np.int64, count),
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
    """The packed new tokens."""
    parts = [seq.tokens[seq.num_computed : seq.num_computed + n] for seq, n in zip(step.seqs, step.counts, strict=True)]
    return np.fromiter(chain.from_iterable(parts), np.int64, step.num_tokens)


def _sampled(step: Step, query_start: Int64) -> tuple[list[Sequence], Int64]:
    """Sequences whose tokens are complete after the step, forked siblings beside their leader."""
    chosen = [
        i
        for i, (seq, count) in enumerate(zip(step.seqs, step.counts, strict=True))
        if seq.num_computed + count == len(seq.tokens) < seq.limit
    ]
    forks = dict(step.forks)
    if not forks:
        return [step.seqs[i] for i in chosen], query_start[1:][chosen] - 1
    sampled: list[Sequence] = []
    index: list[int] = []
    for i in chosen:
        group = [step.seqs[i], *forks.get(i, ())]
        sampled += group
        index += [int(query_start[i + 1]) - 1] * len(group)
    return sampled, np.array(index, np.int64)
