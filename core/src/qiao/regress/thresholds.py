"""What must hold: thresholds per tag, as ``dosage: numeric 0`` or ``law: kl 0.02, top1 0.95``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from qiao.errors import ParameterError
from qiao.regress.figures import Figure, Figures
from qiao.regress.suite import Suite


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that can be limited: from above, or ``at_least``. ``tokens``: it needs distributions, not only texts."""

    text: str
    at_least: bool = False
    tokens: bool = False


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "kl": Metric("mean KL divergence a token, nats, at most", tokens=True),
        "kl_p99": Metric("KL divergence of the 99th percentile of tokens, nats, at most", tokens=True),
        "kl_max": Metric("largest KL divergence of a token, nats, at most", tokens=True),
        "top1": Metric("share of positions with the same likeliest token, at least", at_least=True, tokens=True),
        "perplexity": Metric("relative growth of perplexity on the references, at most", tokens=True),
        "numeric": Metric("largest change of a number in an answer, at most"),
        "lost": Metric("cases whose check the base passes and the candidate fails, at most"),
        "passes": Metric("share of checks that the candidate passes, at least", at_least=True),
        "changed": Metric("share of cases whose greedy text differs, at most"),
    }
)


@dataclass(frozen=True, slots=True)
class Threshold:
    """``metric`` of the cases with ``tag`` has the limit ``limit``."""

    tag: str
    metric: str
    limit: float

    def __str__(self) -> str:
        return f"{self.tag}: {self.metric} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A threshold beside the figure found. ``close`` says that the limit lies inside the figure's interval."""

    threshold: Threshold
    figure: Figure
    holds: bool
    close: bool


def parse_thresholds(texts: Iterable[str]) -> list[Threshold]:
    """Each text is ``TAG: METRIC LIMIT``, more of them after commas; a later one of the same kind replaces.

    Raises ``ParameterError``.
    """
    found: dict[tuple[str, str], Threshold] = {}
    for text in texts:
        tag, colon, rest = text.partition(":")
        if not colon:
            raise ParameterError("--threshold", f"{text!r}: write TAG: METRIC LIMIT, for example 'dosage: numeric 0'")
        for item in rest.split(","):
            threshold = _one(tag.strip(), item, text)
            found[threshold.tag, threshold.metric] = threshold
    return list(found.values())


def _one(tag: str, item: str, text: str) -> Threshold:
    words = item.split()
    if len(words) != 2:
        raise ParameterError("--threshold", f"{text!r}: after the tag comes a metric and its limit, as in 'kl 0.02'")
    name = words[0].lower()
    if name not in METRICS:
        raise ParameterError("--threshold", f"{words[0]!r} is no metric{_near(name, METRICS)}")
    try:
        limit = float(words[1].removesuffix("%")) / (100.0 if words[1].endswith("%") else 1.0)
    except ValueError:
        raise ParameterError("--threshold", f"{text!r}: the limit must be a number, got {words[1]!r}") from None
    if not math.isfinite(limit) or limit < 0.0:
        raise ParameterError("--threshold", f"{text!r}: the limit must be a number of at least 0")
    return Threshold(tag, name, limit)


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def usable(thresholds: list[Threshold], suite: Suite, text_only: bool) -> tuple[list[Threshold], list[Threshold]]:
    """Those that can be judged, and those that ``text_only`` leaves out.

    Raises ``ParameterError`` where there are none, for a tag that no case has, and for a metric that its cases cannot
    give, so that no threshold holds because nothing was measured.
    """
    judged = [t for t in thresholds if not (text_only and METRICS[t.metric].tokens)]
    for threshold in judged:
        if threshold.tag not in suite.tags:
            raise ParameterError(
                "--threshold", f"no case has the tag {threshold.tag!r}{_near(threshold.tag, suite.tags)}"
            )
        cases = [suite.cases[i] for i in suite.tagged(threshold.tag)]
        if threshold.metric == "perplexity" and not any(case.reference for case in cases):
            raise ParameterError("--threshold", f"'{threshold}': no case with this tag has a reference")
        if threshold.metric in ("lost", "passes") and not any(case.check for case in cases):
            raise ParameterError("--threshold", f"'{threshold}': no case with this tag has a check")
    if not judged:
        why = " that texts alone can tell" if thresholds else ""
        example = "--threshold 'all: changed 0.1'"
        raise ParameterError("--threshold", f"there is none{why}, so there would be no verdict; for example {example}")
    return judged, [t for t in thresholds if t not in judged]


def judge(thresholds: Iterable[Threshold], figures: Mapping[str, Figures]) -> list[Judgement]:
    """Each threshold beside its value."""
    return [_judged(threshold, figures[threshold.tag]) for threshold in thresholds]


def _judged(threshold: Threshold, figures: Figures) -> Judgement:
    figure: Figure | None = getattr(figures, threshold.metric)
    assert figure is not None, "usable() lets pass what was measured"
    value, limit = figure.value, threshold.limit
    holds = value >= limit if METRICS[threshold.metric].at_least else value <= limit
    close = figure.low is not None and figure.high is not None and figure.low < limit < figure.high
    return Judgement(threshold, figure, holds, close)
