"""From logits to tokens, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt
import torch

from qiao.contract import SamplingTensors
from qiao.engine.batch import place
from qiao.engine.logit_edits import LogitEdits
from qiao.engine.logprobs import score
from qiao.engine.penalties import Ahead, Penalties
from qiao.engine.request import TokenLogprobs
from qiao.engine.rows import Int64
from qiao.engine.sequence import Sequence
from qiao.engine.uniform import uniforms
from qiao.optable import OpTable

NO_TOKEN = -1
"""In place of a token where a row's logits hold NaN or infinity, or leave nothing to choose from."""

_SEED_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Sampled:
    """``token_ids`` of N rows: one for each, more where drafts held, ``NO_TOKEN`` alone where a row failed.

    ``logprobs`` are by row and token, None for a row that did not ask, and None if no row asked.
    """

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None] | None


class Sampler:
    """Per-row settings in persistent arrays, written when a sequence joins and gathered each step.

    Log-probabilities are those of the model's own logits, before edits, penalties and temperature.
    """

    def __init__(self, num_rows: int, vocab_size: int, ops: OpTable) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int32)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seed = np.zeros(num_rows, np.uint64)
        self._position = np.zeros(num_rows, np.int64)
        self._logprobs = np.full(num_rows, -1, np.int64)
        self._edits = LogitEdits(num_rows, vocab_size)
        self._penalties = Penalties(num_rows, vocab_size)

    def join(self, seq: Sequence) -> None:
        """Take over the settings of ``seq`` at its row."""
        params, row = seq.request.params, seq.row
        random = not params.greedy
        self._temperature[row] = params.temperature if random else 0.0
        self._top_k[row] = params.top_k if random and 0 < params.top_k < self._vocab_size else 0
        self._top_p[row] = params.top_p if random else 1.0
        self._min_p[row] = params.min_p if random else 0.0
        self._seed[row] = seq.seed & _SEED_MASK
        self._position[row] = seq.num_output
        wanted = params.logprobs
        self._logprobs[row] = -1 if wanted is None else self._vocab_size if wanted == -1 else wanted
        self._edits.join(seq)
        self._penalties.join(seq)

    def takes_best(self, rows: Int64) -> bool:
        """Whether each of ``rows`` [N] just takes its highest logit, as long as its sequence has it."""
        special = self._temperature, self._edits.active, self._penalties.active, self._logprobs >= 0
        return not any(x[rows].any() for x in special)

    def sample(self, logits: torch.Tensor, rows: Int64) -> Sampled:
        """One token for each of ``rows`` [N] from ``logits`` [N, V] float32 on the sampling device; may change them."""
        ids, scored = self.draw(logits, rows)
        host = ids.cpu().numpy()
        self._position[rows] += 1
        self._penalties.append(rows, host)
        for row in rows[host == NO_TOKEN].tolist():
            self._edits.blame(row)
        logprobs = None if scored is None else [None if one is None else [one] for one in scored]
        return Sampled(host[:, None].tolist(), logprobs)

    def verify(self, logits: torch.Tensor, rows: Int64, drafts: Items[Items[int]]) -> Sampled:
        """As ``sample``, where row i has a draft of k tokens and k + 1 ``logits``: before it, and behind each of them.

        Each position is drawn as it would be without drafts, so what is kept is what would have come anyway: up to and
        with the first token that is not the draft's.
        """
        ahead = [draft[:k] for draft in drafts for k in range(len(draft) + 1)]
        counts = np.array([len(draft) + 1 for draft in drafts], np.int64)
        drawn, scored = self.draw(logits, np.repeat(rows, counts), ahead)
        ids, start = drawn.tolist(), 0
        result = Sampled([], None if scored is None else [])
        for row, draft in zip(rows.tolist(), drafts, strict=True):
            kept = ids[start : start + len(draft) + 1]
            kept = kept[: _agreed(kept, draft)]
            if kept[0] == NO_TOKEN:
                self._edits.blame(row)
            result.token_ids.append(kept)
            if scored is not None and result.logprobs is not None:
                found = [one for one in scored[start : start + len(kept)] if one is not None]
                result.logprobs.append(found or None)
            self._position[row] += len(kept)
            self._penalties.append(np.full(len(kept), row, np.int64), np.array(kept, np.int64))
            start += len(draft) + 1
        return result

    def draw(
        self, logits: torch.Tensor, rows: Int64, ahead: Ahead | None = None
    ) -> tuple[torch.Tensor, list[TokenLogprobs | None] | None]:
        """The next token of each of ``rows`` [N], as if ``ahead`` [N] had been sampled before; nothing is remembered.

        Ids [N] int64 on the sampling device, and what was asked for of their log-probabilities. May change ``logits``.
        """
        ops, device = self._ops, self._ops.sample_device
        wanted = self._logprobs[rows]
        asked = np.flatnonzero(wanted >= 0)
        edited, penalised = self._edits.active[rows].any(), np.flatnonzero(self._penalties.active[rows])
        raw = _select(logits, asked, device, copy=bool(edited or len(penalised))) if len(asked) else None
        if edited:
            self._edits.apply(logits, rows, device, ahead)
        if len(penalised):
            at = place(penalised, device)
            chosen_ahead = None if ahead is None else [ahead[i] for i in penalised.tolist()]
            tensors = self._penalties.tensors(rows[penalised], device, chosen_ahead)
            logits[at] = ops.apply_penalties(logits[at], tensors)
        params = self._tensors(rows, ahead)
        ids = _checked(logits, ops.sample(logits, params), params)
        found: list[TokenLogprobs | None] | None = None
        if raw is not None:
            chosen = ids if len(asked) == len(rows) else ids[place(asked, device)]
            found = [None] * len(rows)
            for i, entry in zip(asked.tolist(), score(ops, raw, chosen.clamp(min=0), wanted[asked]), strict=True):
                found[i] = entry
        return ids, found

    def _tensors(self, rows: Int64, ahead: Ahead | None) -> SamplingTensors:
        device = self._ops.sample_device
        temperature, top_k = self._temperature[rows], self._top_k[rows]
        top_p, min_p = self._top_p[rows], self._min_p[rows]
        all_greedy = not temperature.any()
        uniform = np.zeros(len(rows), np.float32)
        if not all_greedy:
            further = 0 if ahead is None else np.array([len(tokens) for tokens in ahead], np.int64)
            uniform = uniforms(self._seed[rows], self._position[rows] + further)
        return SamplingTensors(
            temperature=place(temperature, device),
            top_k=place(top_k, device),
            top_p=place(top_p, device),
            min_p=place(min_p, device),
            uniform=place(uniform, device),
            all_greedy=all_greedy,
            any_top_k=bool(top_k.any()),
            any_top_p=bool((top_p < 1.0).any()),
            any_min_p=bool(min_p.any()),
        )


def take(logits: npt.NDArray[np.float32], best: Int64) -> Sampled:
    """The tokens ``best`` [N] int64, the highest of each row of ``logits`` [N, V]."""
    ids = best.tolist()
    return Sampled([[t if isfinite(logits.item(i, t)) else NO_TOKEN] for i, t in enumerate(ids)], None)


def _agreed(ids: Items[int], draft: Items[int]) -> int:
    """How many of ``ids`` are to be kept: the draft as far as it was right, and the token behind it."""
    count = 1
    while count <= len(draft) and ids[count - 1] == draft[count - 1] and ids[count] != NO_TOKEN:
        count += 1
    return count


def _select(logits: torch.Tensor, index: Int64, device: str, copy: bool) -> torch.Tensor:
    if len(index) == len(logits):
        return logits.clone() if copy else logits
    return logits[place(index, device)]


def _checked(logits: torch.Tensor, ids: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """``ids`` with ``NO_TOKEN`` where the chosen logit, or the largest of a random row, is not finite.

    The arg max of a row with a NaN is the NaN, so greedy rows need no pass over the vocabulary.
    """
    ids = ids.clamp(0, logits.shape[1] - 1)  # what a row of NaN draws may be no id at all
    bad = ~logits.gather(1, ids[:, None]).squeeze(1).isfinite()
    if not params.all_greedy:
        bad |= ~logits.amax(dim=1).isfinite() & (params.temperature > 0)
    return ids.masked_fill(bad, NO_TOKEN)
