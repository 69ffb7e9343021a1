"""Sampling family, vectorised over rows and without a sort of the whole vocabulary where that can be avoided.

Every filter of the specification keeps a prefix of the tokens in order of falling logit. So the ``k`` largest settle a
row as soon as the prefix ends, or the token drawn lies, among them; ``k`` grows for the rows where that is not so.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from qiao.contract import LogprobOutput, PenaltyTensors, SamplingTensors, composites, hookimpl

_FIRST, _GROWTH = 128, 16
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


def _draw(
    logits: torch.Tensor, top: torch.Tensor, params: SamplingTensors, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Try rows [M, V] with their ``k`` largest; ``top`` [M] is the largest: (token ids [M], settled [M] bool)."""
    vocab, whole = logits.shape[1], k == logits.shape[1]
    # the largest goes before the division: x / 1e-38 overflows, 0 / 1e-38 does not
    temperature = params.temperature.clamp(min=_TINY)[:, None]
    values, ids = _ordered(logits, k)
    weight = ((values - top[:, None]).double() / temperature.double()).exp()
    mass = weight.cumsum(1)
    top_k = torch.where(params.top_k > 0, params.top_k, vocab).clamp(max=vocab).long()
    total = _at(mass, top_k.clamp(max=k) - 1)
    if not whole:
        everything = ((logits - top[:, None]) / temperature).exp_().sum(1, dtype=torch.float64)
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


def _rows(params: SamplingTensors, rows: torch.Tensor) -> SamplingTensors:
    names = ("temperature", "top_k", "top_p", "min_p", "uniform")
    return replace(params, **{name: getattr(params, name)[rows] for name in names})


@hookimpl
def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """See ``SamplingSpec.sample``. Raises ``FloatingPointError`` naming rows that hold a NaN or allow no token."""
    top = logits.amax(1)  # a NaN anywhere makes it NaN
    if not bool(torch.isfinite(top).all()):
        bad = (~torch.isfinite(top)).nonzero().flatten().tolist()
        raise FloatingPointError(f"logits of rows {bad} hold NaN, infinity or no allowed token; refusing to sample")
    tokens = logits.argmax(1)
    if params.all_greedy:
        return tokens
    rows = (params.temperature > 0).nonzero().flatten()
    k = min(_FIRST, logits.shape[1])
    while len(rows):
        drawn, settled = _draw(logits[rows], top[rows], _rows(params, rows), k)
        tokens[rows[settled]] = drawn[settled]
        rows = rows[~settled]
        k = min(k * _GROWTH, logits.shape[1])
    return tokens


@hookimpl
def apply_penalties(logits: torch.Tensor, params: PenaltyTensors) -> torch.Tensor:
    """The contract's sequence itself."""
    return composites.apply_penalties(logits, params)


@hookimpl
def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> LogprobOutput:
    """The contract's sequence itself."""
    return composites.logprobs(logits, token_ids, top)
