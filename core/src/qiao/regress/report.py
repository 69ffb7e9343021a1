"""The report as data: what ``--json`` writes, and what the page and the terminal show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from qiao.regress.divergence import Divergence
from qiao.regress.figures import LEVEL, RESAMPLES, SEED, figures_by_tag, finite
from qiao.regress.models import Answer
from qiao.regress.results import CaseResult
from qiao.regress.run import Comparison
from qiao.regress.thresholds import Judgement, Threshold, judge

WORST = 10
"""Cases that a report shows side by side."""

_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)


def make_report(
    comparison: Comparison, thresholds: Sequence[Threshold], left_out: Sequence[Threshold] = ()
) -> dict[str, Any]:
    """JSON-ready: ``passes``, ``verdicts``, ``tags``, ``cases`` (worst first), both models, settings and ``notes``.

    KL in nats, shares from 0 to 1, infinity as the text ``inf``.
    """
    figures = figures_by_tag(comparison.suite, comparison.results)
    verdicts = judge(thresholds, figures)
    every = Divergence.joined([result.distributions for result in comparison.results])
    ordered = sorted(comparison.results, key=_badness, reverse=True)
    return {
        "passes": all(verdict.holds for verdict in verdicts),
        "verdicts": [_verdict(verdict) for verdict in verdicts],
        "not_judged": [str(threshold) for threshold in left_out],
        "suite": {
            "name": comparison.suite.header.suite,
            "description": comparison.suite.header.description,
            "cases": len(comparison.suite.cases),
        },
        "base": asdict(comparison.base),
        "candidate": asdict(comparison.candidate),
        "text_only": comparison.text_only,
        "tags": {tag: found.as_dict() for tag, found in figures.items()},
        "kl_quantiles": _quantiles(every),
        "cases": [_case(result) for result in ordered],
        "notes": [{"key": key, "values": values} for key, values in comparison.notes],
        "bootstrap": {"resamples": RESAMPLES, "level": LEVEL, "seed": SEED},
    }


def _verdict(verdict: Judgement) -> dict[str, Any]:
    threshold = verdict.threshold
    return {
        "threshold": str(threshold),
        "tag": threshold.tag,
        "metric": threshold.metric,
        "limit": threshold.limit,
        "value": finite(verdict.figure.value),
        "low": verdict.figure.low,
        "high": verdict.figure.high,
        "holds": verdict.holds,
        "close": verdict.close,
    }


def _badness(result: CaseResult) -> tuple[bool, float, bool]:
    """Lost checks first, then large divergences, then other texts."""
    every = result.distributions
    return bool(result.base_passes) and not result.passes, float(every.kl.mean()) if len(every) else 0.0, result.changed


def _quantiles(every: Divergence) -> list[tuple[float, float]]:
    if not len(every):
        return []
    return list(zip(_QUANTILES, np.quantile(every.kl, _QUANTILES).tolist(), strict=True))


def _case(result: CaseResult) -> dict[str, Any]:
    case, split = result.case, result.split
    return {
        "id": case.id,
        "tags": case.tags,
        "question": case.question,
        "check": None if case.check is None else {"kind": case.check.kind, "expected": case.check.expected()},
        "base": _answer(result.base, result.base_passes),
        "candidate": _answer(result.candidate, result.passes),
        "changed": result.changed,
        "numeric": finite(result.numeric),
        "answer": _along(result.answer),
        "reference": _along(result.reference),
        "split": None if split is None else asdict(split),
    }


def _answer(answer: Answer, passes: bool | None) -> dict[str, Any]:
    return {"text": answer.text, "pieces": answer.pieces, "tokens": len(answer.token_ids), "passes": passes}


def _along(found: Divergence) -> dict[str, Any] | None:
    """The figures along one text, and the divergence of each of its tokens; None where it was not measured."""
    if not len(found):
        return None
    return {
        "positions": len(found),
        "kl": float(found.kl.mean()),
        "top1": float(found.same_top.mean()),
        "base_logprob": float(found.base_logprob.mean()),
        "logprob": float(found.logprob.mean()),
        "kl_by_token": [float(f"{value:.4g}") for value in found.kl.tolist()],
    }


def tag_rows(report: Mapping[str, Any], intervals: bool = True) -> list[dict[str, str]]:
    """Each tag's figures as text, for tables; without ``intervals`` short ones."""
    return [{"tag": tag, **_row(found, intervals)} for tag, found in report["tags"].items()]


def _row(found: Mapping[str, Any], intervals: bool) -> dict[str, str]:
    def text(name: str, form: str) -> str:
        figure = found[name]
        return with_interval(figure, form) if intervals or figure is None else shown(figure["value"], form)

    arrow, slash = (" → ", " / ") if intervals else ("→", "/")
    checks = f"{found['base_passes']}{arrow}{found['candidate_passes']}{slash}{found['checked']}"
    return {
        "cases": str(found["cases"]),
        "kl": text("kl", ".3g" if intervals else ".2g"),
        "kl_p99": text("kl_p99", ".3g"),
        "top1": text("top1", ".1%"),
        "perplexity": _perplexities(found, intervals),
        "checks": checks if found["checked"] else "-",
        "lost": text("lost", ".0f"),
        "changed": text("changed", ".0%"),
        "numeric": text("numeric", ".4g"),
    }


def label(facts: Mapping[str, Any]) -> str:
    """A model's name with its settings, which may be all that sets it apart."""
    settings = ", ".join(f"{key}={value}" for key, value in facts["settings"].items() if key != "model")
    return f"{facts['name']} ({settings})" if settings else str(facts["name"])


def _perplexities(found: Mapping[str, Any], both: bool) -> str:
    if found["perplexity"] is None:
        return "-"
    growth = shown(found["perplexity"]["value"], "+.1%")
    if not both:
        return growth
    return f"{found['base_perplexity']:.4g} → {found['candidate_perplexity']:.4g} ({growth})"


def with_interval(figure: Mapping[str, Any] | None, form: str) -> str:
    """A figure with its interval, ``-`` for None."""
    if figure is None:
        return "-"
    text = shown(figure["value"], form)
    if figure["low"] is None or figure["low"] == figure["high"]:
        return text
    return f"{text} [{shown(figure['low'], form)}, {shown(figure['high'], form)}]"


def shown(value: float | str, form: str) -> str:
    """A number, or the text that stands for infinity."""
    return "∞" if isinstance(value, str) else format(value, form)


def worst(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cases that deserve a look: at most ``WORST``, none that is equal in all respects."""
    cases = [case for case in report["cases"] if case["changed"] or any(_kl(case, part) for part in _PARTS)]
    return cases[:WORST]


_PARTS = ("answer", "reference")


def _kl(case: Mapping[str, Any], part: str) -> float:
    return float(case[part]["kl"]) if case[part] else 0.0
