"""Which tokens each penalised row has seen."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from qiao.contract import PenaltyTensors
from qiao.engine.batch import place
from qiao.engine.rows import Int64
from qiao.engine.sequence import Sequence

Ahead = Items[Items[int]]
"""For each row the tokens that its sequence is supposed to have behind those that it has."""


class _IdRows:
    """Token ids by row, each in a buffer of its own that doubles when full."""

    def __init__(self, padding: int) -> None:
        self._padding = padding
        self._buffers: dict[int, Int64] = {}
        self._lengths: dict[int, int] = {}

    def set(self, row: int, ids: list[int]) -> None:
        """Replace a row."""
        buffer = np.empty(len(ids) + 32, np.int64)
        buffer[: len(ids)] = ids
        self._buffers[row], self._lengths[row] = buffer, len(ids)

    def drop(self, row: int) -> None:
        """Free a row's memory."""
        self._buffers.pop(row, None)
        self._lengths.pop(row, None)

    def append(self, rows: Int64, ids: Int64) -> None:
        """One more id to each of ``rows``."""
        for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
            buffer, length = self._buffers[row], self._lengths[row]
            if length == len(buffer):
                buffer = self._buffers[row] = np.concatenate((buffer, np.empty_like(buffer)))
            buffer[length] = token
            self._lengths[row] = length + 1

    def gather(self, rows: Int64, ahead: Ahead | None = None) -> Int64:
        """The ids of ``rows``, each with its ``ahead`` behind them, padded to the longest."""
        chosen = rows.tolist()
        more = ahead if ahead is not None else [()] * len(chosen)
        width = max(self._lengths[row] + len(ids) for row, ids in zip(chosen, more, strict=True))
        out = np.full((len(chosen), width), self._padding, np.int64)
        for i, (row, ids) in enumerate(zip(chosen, more, strict=True)):
            length = self._lengths[row]
            out[i, :length] = self._buffers[row][:length]
            out[i, length : length + len(ids)] = ids
        return out


class Penalties:
    """Settings and seen tokens of the rows that ask for penalties.

    Ids are kept once for each distinct prompt token (only "seen" matters there) and once for each output token (their
    count matters).
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.active = np.zeros(num_rows, np.bool_)
        self._presence = np.zeros(num_rows, np.float32)
        self._frequency = np.zeros(num_rows, np.float32)
        self._repetition = np.ones(num_rows, np.float32)
        self._prompt = _IdRows(vocab_size)
        self._output = _IdRows(vocab_size)

    def join(self, seq: Sequence) -> None:
        """Take over the settings and tokens of ``seq`` at its row."""
        params, row = seq.request.params, seq.row
        wanted = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        self.active[row] = wanted
        if not wanted:
            self._prompt.drop(row)
            self._output.drop(row)
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

    def tensors(self, rows: Int64, device: str, ahead: Ahead | None = None) -> PenaltyTensors:
        """The penalties of ``rows``, all of which are active, on ``device``, as if ``ahead`` had been sampled."""
        return PenaltyTensors(
            prompt_ids=place(self._prompt.gather(rows), device),
            output_ids=place(self._output.gather(rows, ahead), device),
            presence=place(self._presence[rows], device),
            frequency=place(self._frequency[rows], device),
            repetition=place(self._repetition[rows], device),
        )
