"""From cases to figures per tag, with bootstrap intervals."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from qiao.regress.divergence import Divergence, Floats
from qiao.regress.results import CaseResult
from qiao.regress.suite import Suite

RESAMPLES = 2000
LEVEL = 0.95
SEED = 20261130
"""Of the bootstrap, so that a report can be made again."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A value with the bootstrap interval of ``LEVEL`` around it, where one can be had."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """What was found of the cases of one tag; None where it was not measured. See ``METRICS`` of the thresholds.

    ``answer_kl`` and ``reference_kl`` are the two parts of ``kl``. Perplexities are of the references.
    """

    cases: int
    positions: int
    checked: int
    base_passes: int
    candidate_passes: int
    gained: int
    kl: Figure | None
    kl_p99: Figure | None
    kl_max: Figure | None
    answer_kl: Figure | None
    reference_kl: Figure | None
    top1: Figure | None
    perplexity: Figure | None
    base_perplexity: float | None
    candidate_perplexity: float | None
    passes: Figure | None
    lost: Figure | None
    changed: Figure | None
    numeric: Figure | None

    def as_dict(self) -> dict[str, object]:
        """JSON-ready, infinity as the text ``inf``."""
        return {name: finite(value) for name, value in asdict(self).items()}


def finite(value: object) -> object:
    """``value`` with infinities as texts, which JSON has no number for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def figures_by_tag(suite: Suite, results: list[CaseResult]) -> dict[str, Figures]:
    """``Figures`` of all cases and of each tag, in the suite's order."""
    return {tag: figures_of([results[i] for i in suite.tagged(tag)]) for tag in suite.tags}


def figures_of(results: list[CaseResult]) -> Figures:
    """The figures of these cases, of which there is at least one.

    Whole cases are drawn again in the bootstrap, since the tokens of a case depend on each other.
    """
    table = _Table(results)
    every = Divergence.joined([result.distributions for result in results])
    losses = [r for r in results if r.base_passes and not r.passes]
    gains = [r for r in results if r.base_passes is False and r.passes]
    checked = [r for r in results if r.passes is not None]
    growth = table.ratio("reference_growth", "reference_positions")
    base, candidate = _perplexities(results)
    return Figures(
        cases=len(results),
        positions=len(every),
        checked=len(checked),
        base_passes=sum(bool(r.base_passes) for r in checked),
        candidate_passes=sum(bool(r.passes) for r in checked),
        gained=len(gains),
        kl=table.ratio("kl", "positions"),
        kl_p99=Figure(float(np.quantile(every.kl, 0.99))) if len(every) else None,
        kl_max=Figure(float(every.kl.max())) if len(every) else None,
        answer_kl=table.ratio("answer_kl", "answer_positions"),
        reference_kl=table.ratio("reference_kl", "reference_positions"),
        top1=table.ratio("same_top", "positions"),
        perplexity=None if growth is None else _mapped(growth),
        base_perplexity=base,
        candidate_perplexity=candidate,
        passes=table.ratio("passes", "checked"),
        lost=table.total("lost", len(losses)) if checked else None,
        changed=table.ratio("changed", "cases"),
        numeric=Figure(max(r.numeric for r in results)),
    )


def _mapped(growth: Figure) -> Figure:
    """Mean growth of the loss in nats as the relative growth of perplexity."""
    low, high = (None if bound is None else math.expm1(bound) for bound in (growth.low, growth.high))
    return Figure(math.expm1(growth.value), low, high)


def _perplexities(results: list[CaseResult]) -> tuple[float | None, float | None]:
    text = Divergence.joined([result.reference for result in results])
    if not len(text):
        return None, None
    return math.exp(-float(text.base_logprob.mean())), math.exp(-float(text.logprob.mean()))


class _Table:
    """Sums of each case as columns [C], and the same sums for each resample [R]."""

    def __init__(self, results: list[CaseResult]) -> None:
        rows = [_sums(result) for result in results]
        self._columns: dict[str, Floats] = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        draws = np.random.default_rng(SEED).multinomial(len(rows), np.full(len(rows), 1 / len(rows)), RESAMPLES)
        self._resampled: dict[str, Floats] = {name: draws @ column for name, column in self._columns.items()}

    def ratio(self, over: str, under: str) -> Figure | None:
        """The quotient of two sums; None where the lower one is 0."""
        below = float(self._columns[under].sum())
        if not below:
            return None
        drawn = self._resampled[under]
        samples = self._resampled[over][drawn > 0] / drawn[drawn > 0]
        return _interval(float(self._columns[over].sum()) / below, samples)

    def total(self, name: str, value: int) -> Figure:
        """A sum."""
        return _interval(float(value), self._resampled[name])


def _sums(result: CaseResult) -> dict[str, float]:
    every, answer, text = result.distributions, result.answer, result.reference
    return {
        "cases": 1.0,
        "positions": float(len(every)),
        "kl": float(every.kl.sum()),
        "same_top": float(every.same_top.sum()),
        "answer_positions": float(len(answer)),
        "answer_kl": float(answer.kl.sum()),
        "reference_positions": float(len(text)),
        "reference_kl": float(text.kl.sum()),
        "reference_growth": float((text.base_logprob - text.logprob).sum()),
        "checked": float(result.passes is not None),
        "passes": float(bool(result.passes)),
        "lost": float(bool(result.base_passes) and not result.passes),
        "changed": float(result.changed),
    }


def _interval(value: float, samples: Floats) -> Figure:
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(value, float(low), float(high))
