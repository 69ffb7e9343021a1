"""Changes to single logits: grammars, allowed tokens, bad words, tokens that may not end a sequence yet, biases."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import numpy as np
import torch

from qiao.engine.batch import place
from qiao.engine.grammars import FIELD, GrammarState, allowed_tokens
from qiao.engine.penalties import Ahead
from qiao.engine.rows import Int64
from qiao.engine.sequence import Sequence

_EDITS = "allowed_token_ids, bad_words and the end tokens that min_tokens puts off"


class _RowEdit:
    """The edits of one sequence, resolved once."""

    __slots__ = ("allowed", "bad_words", "bias", "ends", "min_tokens", "seq")

    def __init__(self, seq: Sequence, vocab_size: int) -> None:
        params = seq.request.params
        self.seq = seq
        self.bias = params.logit_bias or {}
        self.allowed = sorted(set(params.allowed_token_ids or ()))
        self.bad_words = params.bad_words_token_ids or []
        self.min_tokens = params.min_tokens
        self.ends = [t for t in seq.stops if t < vocab_size]

    @property
    def empty(self) -> bool:
        """Whether nothing will ever be changed."""
        listed = self.bias or self.allowed or self.bad_words or (self.min_tokens and self.ends)
        return not listed and self.seq.grammar is None

    def banned(self, ahead: Items[int]) -> list[int]:
        """Token ids that may not come next, behind ``ahead``."""
        seq = self.seq
        count = seq.num_output + len(ahead)
        found = list(self.ends) if count < self.min_tokens else []
        for word in self.bad_words:
            before = len(word) - 1
            if count >= before and (not before or [*seq.tokens[-before:], *ahead][-before:] == word[:-1]):
                found.append(word[-1])
        return found

    def grammar(self, ahead: Items[int]) -> GrammarState | None:
        """The state that says what may come behind ``ahead``; None where anything may, or nothing ever comes there."""
        state = self.seq.grammar
        if state is not None and ahead:
            state = state.behind(ahead)
        return state if state is not None and state.bounds else None


class LogitEdits:
    """Edits by row. ``active`` [R] says which rows have any."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.active = np.zeros(num_rows, np.bool_)
        self._edits: dict[int, _RowEdit] = {}
        self._vocab_size = vocab_size
        self._bits: torch.Tensor | None = None

    def join(self, seq: Sequence) -> None:
        """Take over the edits of ``seq`` at its row."""
        edit = _RowEdit(seq, self._vocab_size)
        self.active[seq.row] = not edit.empty
        self._edits.pop(seq.row, None)
        if not edit.empty:
            self._edits[seq.row] = edit

    def apply(self, logits: torch.Tensor, rows: Int64, device: str, ahead: Ahead | None = None) -> None:
        """Change ``logits`` [N, V] in place where ``rows`` [N] ask for it. A banned token gets -inf.

        In vLLM's order: grammars, allowed tokens, bad words and early ends, biases. ``ahead``: see ``Sampler.draw``.
        """
        self._follow_grammars(logits, rows, device, ahead)
        at: list[int] = []
        banned: list[int] = []
        bias_at: list[int] = []
        bias_ids: list[int] = []
        bias_values: list[float] = []
        for i in np.flatnonzero(self.active[rows]).tolist():
            edit = self._edits[int(rows[i])]
            if edit.allowed:
                self._keep_only(logits[i], edit.allowed, device)
            ids = edit.banned(ahead[i] if ahead is not None else ())
            at += [i] * len(ids)
            banned += ids
            bias_at += [i] * len(edit.bias)
            bias_ids += edit.bias.keys()
            bias_values += edit.bias.values()
        if at:
            logits[_ids(at, device), _ids(banned, device)] = -math.inf
        if bias_at:
            where = (_ids(bias_at, device), _ids(bias_ids, device))
            logits[where] = logits[where] + place(np.array(bias_values, np.float32), device)

    def blame(self, row: int) -> None:
        """Note at its request where the edits of ``row``, from which nothing could be chosen, leave no token at all."""
        edit = self._edits.get(row)
        if edit is None or edit.seq.request.fault is not None:
            return
        left = np.ones(self._vocab_size, np.bool_)
        if edit.allowed:
            left[:] = False
            left[edit.allowed] = True
        left[edit.banned(())] = False
        state = edit.grammar(())
        if state is not None:
            mask = np.unpackbits(allowed_tokens([state], self._vocab_size)[0], bitorder="little")
            left &= mask[: self._vocab_size] != 0
        if not left.any():
            request = edit.seq.request
            request.fault_field = FIELD if state is not None else "allowed_token_ids" if edit.allowed else "bad_words"
            request.fault = f"no token is left after {'the grammar, ' if state else ''}{_EDITS}; loosen one of them"

    def _follow_grammars(self, logits: torch.Tensor, rows: Int64, device: str, ahead: Ahead | None) -> None:
        """Leave only the tokens that the grammars of ``rows`` [N] allow; a grammar that gives up marks its request."""
        at: list[int] = []
        states: list[GrammarState] = []
        for i in np.flatnonzero(self.active[rows]).tolist():
            state = self._edits[int(rows[i])].grammar(ahead[i] if ahead is not None else ())
            if state is not None:
                at.append(i)
                states.append(state)
        if not at:
            return
        masks = allowed_tokens(states, self._vocab_size)
        for n, (i, state) in enumerate(zip(at, states, strict=True)):
            if state.fault is None:
                continue
            seq = self._edits[int(rows[i])].seq
            if state is seq.grammar:
                seq.request.fault = f"the answer cannot follow the grammar: {state.fault}"
                seq.request.fault_field = FIELD
            else:
                masks[n] = 0  # nothing is kept from here on; the step that comes here will find the fault itself
        if self._bits is None or self._bits.device != logits.device:
            table = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
            self._bits = place(table == 0, device)
        forbidden = self._bits[place(masks.astype(np.int64), device)].view(len(at), -1)[:, : logits.shape[1]]
        if len(at) == len(logits):
            logits.masked_fill_(forbidden, -math.inf)
            return
        where = _ids(at, device)
        logits[where] = logits[where].masked_fill(forbidden, -math.inf)

    @staticmethod
    def _keep_only(row: torch.Tensor, allowed: list[int], device: str) -> None:
        ids = _ids(allowed, device)
        kept = row[ids]
        row.fill_(-math.inf)
        row[ids] = kept


def _ids(values: list[int], device: str) -> torch.Tensor:
    return place(np.array(values, np.int64), device)
