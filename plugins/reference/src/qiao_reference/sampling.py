"""Sampling family, without a sort of the vocabulary.

Every filter of the specification keeps a prefix of the tokens in order of falling logit. Most rows are settled by their
``_FIRST`` largest logits, all rows together. A row whose prefix is longer is settled alone: its tokens are counted
into buckets of falling weight, and only the few buckets in which the prefix ends or the draw lies are put in order.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from qiao.contract import LogprobOutput, PenaltyTensors, SamplingTensors, composites, hookimpl

_FIRST = 128
_BUCKETS = 4096
_DEEP = 40.0
"""Tokens lighter than exp(-40) of the largest share the last bucket."""
_TINY = torch.finfo(torch.float32).tiny


def _ordered(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest per row, falling, lower id first on a tie: (values, ids), both [M, k].

    ``topk`` does not state which of the ties at its end it takes: entries equal to the last value are not to be trusted
    unless ``k`` is the whole vocabulary.
    """
    values, ids = torch.topk(logits, k, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, order = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index[:, None])[:, 0]


def _draw(logits: torch.Tensor, top: torch.Tensor, params: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Try rows [M, V] with their largest logits; ``top`` [M] is the largest: (token ids [M], settled [M] bool)."""
    vocab = logits.shape[1]
    k, whole = min(_FIRST, vocab), vocab <= _FIRST
    # the largest goes before the division: x / 1e-38 overflows, 0 / 1e-38 does not
    temperature = params.temperature.clamp(min=_TINY)[:, None]
    values, ids = _ordered(logits, k)
    weight = ((values - top[:, None]).double() / temperature.double()).exp()
    mass = weight.cumsum(1)
    top_k = torch.where(params.top_k > 0, params.top_k, vocab).clamp(max=vocab).long()
    total = _at(mass, top_k.clamp(max=k) - 1)
    if not whole and bool((top_k == vocab).any()):
        everything = (logits - top[:, None]).div_(temperature).exp_().sum(1, dtype=torch.float64)
        total = torch.where(top_k < vocab, total, everything)
    top_p, min_p = params.top_p.double(), params.min_p.double()
    keep = (weight > 0) & (torch.arange(k) < top_k[:, None])
    # a token stays if the mass before it is short of top_p, so the one that crosses it stays too
    keep &= (mass - weight < (top_p * total)[:, None]) | (top_p >= 1)[:, None]
    keep &= weight >= min_p[:, None]  # the largest weight is 1
    keep[:, 0] = True
    count = keep.sum(1)
    ended = torch.ones_like(count, dtype=torch.bool) if whole else count < k
    share = torch.where(ended, _at(mass, count - 1), total)
    place = (mass <= (params.uniform.double() * share)[:, None]).sum(1)
    inside = ended | (place < k)
    place = torch.minimum(place, count - 1)
    if whole:
        return _at(ids, place), ended
    known_total = (top_k <= k) | (top_k == vocab)
    unlimited = (top_p >= 1) & (min_p <= 0)
    clear = _at(values, place) > values[:, -1]
    return _at(ids, place), known_total & inside & clear & (ended | unlimited)


class _Order:
    """The tokens of one row [V] in order of falling logit, put in order only where somebody looks.

    Equal logits never part: the bucket is a monotone function of the logit.
    """

    def __init__(self, row: torch.Tensor, top: torch.Tensor, temperature: float) -> None:
        depth = (top - row).double().div_(max(temperature, _TINY))
        deepest = min(float(depth.max()), _DEEP) or 1.0
        self._row = row
        self.weight = depth.neg().exp_()
        self._bucket = depth.mul_((_BUCKETS - 1) / deepest).clamp_(max=_BUCKETS - 1).int()
        self._mass = torch.bincount(self._bucket, self.weight, minlength=_BUCKETS).cumsum(0)
        self._count = torch.bincount(self._bucket, minlength=_BUCKETS).cumsum(0)
        self._opened: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}

    def _open(self, bucket: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        if bucket not in self._opened:  # the draw often lies where the prefix ends
            self._opened[bucket] = self._sorted(bucket)
        return self._opened[bucket]

    def _sorted(self, bucket: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """One bucket: tokens before it, its ids in order, and the mass up to and with each."""
        ids = (self._bucket == bucket).nonzero()[:, 0]
        ids = ids[self._row[ids].sort(descending=True, stable=True).indices]
        before = bucket - 1
        mass = self.weight[ids].cumsum(0)
        return (int(self._count[before]), ids, mass + self._mass[before]) if bucket else (0, ids, mass)

    def _holding(self, position: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return self._open(int(torch.searchsorted(self._count, position, right=True)))

    def mass(self, count: int) -> float:
        """Mass of the first ``count`` tokens."""
        if count == len(self._row):
            return float(self._mass[-1])
        before, _, mass = self._holding(count - 1)
        return float(mass[count - 1 - before])

    def covering(self, mass: float, right: bool) -> int:
        """How many tokens leave the mass up to and with them short of ``mass``, or, with ``right``, not beyond it."""
        bucket = int(torch.searchsorted(self._mass, mass, right=right))
        if bucket == _BUCKETS:
            return len(self._row)
        before, _, inside = self._open(bucket)
        return before + int(torch.searchsorted(inside, mass, right=right))

    def token(self, position: int) -> int:
        """The id at ``position`` from 0."""
        before, ids, _ = self._holding(position)
        return int(ids[position - before])


def _draw_alone(
    row: torch.Tensor, top: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """The specification for one row [V] whose largest logit is ``top``."""
    order = _Order(row, top, temperature)
    count = min(top_k or len(row), len(row))
    if top_p < 1:
        count = min(count, order.covering(top_p * order.mass(count), right=False) + 1)
    lightest = order.weight >= min_p if min_p > 0 else order.weight > 0
    count = max(1, min(count, int(lightest.sum())))
    return order.token(min(order.covering(uniform * order.mass(count), right=True), count - 1))


def _rows(params: SamplingTensors, rows: torch.Tensor) -> SamplingTensors:
    names = ("temperature", "top_k", "top_p", "min_p", "uniform")
    return replace(params, **{name: getattr(params, name)[rows] for name in names})


@hookimpl
def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """See ``SamplingSpec.sample``. Rows without a finite largest logit come back with the arg max."""
    if params.all_greedy:
        return logits.argmax(1)
    top = logits.amax(1)  # a NaN anywhere makes it NaN
    tokens = logits.argmax(1)
    rows = ((params.temperature > 0) & torch.isfinite(top)).nonzero().flatten()
    if not len(rows):
        return tokens
    if len(rows) < len(logits):
        logits, top, params = logits[rows], top[rows], _rows(params, rows)
    drawn, settled = _draw(logits, top, params)
    settings = (params.temperature, params.top_k, params.top_p, params.min_p, params.uniform)
    for i in (~settled).nonzero().flatten().tolist():
        drawn[i] = _draw_alone(logits[i], top[i], *(setting[i].item() for setting in settings))
    tokens[rows] = drawn
    return tokens


@hookimpl
def apply_penalties(logits: torch.Tensor, params: PenaltyTensors) -> torch.Tensor:
    """The contract's sequence itself."""
    return composites.apply_penalties(logits, params)


@hookimpl
def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> LogprobOutput:
    """The contract's sequence itself."""
    return composites.logprobs(logits, token_ids, top)
