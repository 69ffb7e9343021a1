"""Which tokens each penalised row has seen, kept as arrays that grow with the output."""

from __future__ import annotations

import numpy as np

from qiao.contract import PenaltyTensors
from qiao.engine.batch import place
from qiao.engine.rows import Int64
from qiao.engine.sequence import Sequence


class _IdMatrix:
    """Token ids [R, grown] int64 by row, padded with ``padding``."""

    def __init__(self, num_rows: int, padding: int) -> None:
        self._padding = padding
        self.ids: Int64 = np.full((num_rows, 0), padding, np.int64)
        self.lengths: Int64 = np.zeros(num_rows, np.int64)

    def _reserve(self, width: int) -> None:
        have = self.ids.shape[1]
        if width > have:
            grown = np.full((self.ids.shape[0], max(width, 2 * have, 64)), self._padding, np.int64)
            grown[:, :have] = self.ids
            self.ids = grown

    def set(self, row: int, ids: list[int]) -> None:
        """Replace a row."""
        self._reserve(len(ids))
        self.ids[row] = self._padding
        self.ids[row, : len(ids)] = ids
        self.lengths[row] = len(ids)

    def append(self, rows: Int64, ids: Int64) -> None:
        """One more id to each of ``rows``."""
        self._reserve(int(self.lengths[rows].max()) + 1)
        self.ids[rows, self.lengths[rows]] = ids
        self.lengths[rows] += 1

    def gather(self, rows: Int64) -> Int64:
        """The ids of ``rows``, as wide as the longest."""
        return self.ids[rows, : int(self.lengths[rows].max())]


class Penalties:
    """Settings and seen tokens of the rows that ask for penalties.

    Ids are kept once for each distinct prompt token (only "seen" matters there) and once for each output token (their
    count matters). Memory is taken when the first such request comes.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.active = np.zeros(num_rows, np.bool_)
        self._presence = np.zeros(num_rows, np.float32)
        self._frequency = np.zeros(num_rows, np.float32)
        self._repetition = np.ones(num_rows, np.float32)
        self._prompt = _IdMatrix(num_rows, vocab_size)
        self._output = _IdMatrix(num_rows, vocab_size)

    def join(self, seq: Sequence) -> None:
        """Take over the settings and tokens of ``seq`` at its row."""
        params, row = seq.request.params, seq.row
        wanted = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        self.active[row] = wanted
        if not wanted:
            return
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        self._repetition[row] = params.repetition_penalty
        self._prompt.set(row, sorted(set(seq.tokens[: seq.num_prompt])))
        self._output.set(row, seq.tokens[seq.num_prompt :])

    def append(self, rows: Int64, ids: Int64) -> None:
        """Record sampled ``ids`` [N] of ``rows`` [N]; rows without penalties are left out."""
        active = self.active[rows]
        if active.any():
            self._output.append(rows[active], ids[active])

    def tensors(self, rows: Int64, device: str) -> PenaltyTensors:
        """The penalties of ``rows``, all of which are active, on ``device``."""
        return PenaltyTensors(
            prompt_ids=place(self._prompt.gather(rows), device),
            output_ids=place(self._output.gather(rows), device),
            presence=place(self._presence[rows], device),
            frequency=place(self._frequency[rows], device),
            repetition=place(self._repetition[rows], device),
        )
