"""Persistent per-sequence arrays, so that a step's batch is gathered instead of rebuilt."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from qiao.engine.sequence import Sequence

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class RowTable:
    """One row for each sequence that runs.

    ``block_tables`` [R, P] int32 is 0 beyond a sequence's blocks. ``ones`` [R] int64 and ``numbers`` [R + 1] int32,
    0 up, are constants of decode steps.
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.block_tables: Int32 = np.zeros((num_rows, max_blocks), np.int32)
        self.ones: Int64 = np.ones(num_rows, np.int64)
        self.numbers: Int32 = np.arange(num_rows + 1, dtype=np.int32)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    def take(self, seq: Sequence) -> None:
        """Give ``seq`` a row."""
        assert seq.row < 0, "the sequence has a row already"
        seq.row = self._free.pop()

    def start(self, seq: Sequence) -> None:
        """Write the row of ``seq`` from its blocks."""
        self.block_tables[seq.row, : len(seq.blocks)] = seq.blocks

    def extend(self, seq: Sequence, blocks: list[int]) -> None:
        """Append ``blocks`` to the table of ``seq``."""
        at = len(seq.blocks)
        seq.blocks += blocks
        self.block_tables[seq.row, at : at + len(blocks)] = blocks

    def give_back(self, seq: Sequence) -> None:
        """Clear and free the row of ``seq``."""
        self.block_tables[seq.row, : len(seq.blocks)] = 0
        self._free.append(seq.row)
        seq.row = -1

    @staticmethod
    def of(seqs: Iterable[Sequence], count: int) -> Int64:
        """Row numbers [count] int64 of ``seqs``."""
        return np.fromiter((s.row for s in seqs), np.int64, count)
