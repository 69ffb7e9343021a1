"""Figures against formulas written apart, thresholds, and what the report says."""

from __future__ import annotations

import math
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from qiao.errors import ParameterError
from qiao.regress import parse_thresholds, read_suite, usable
from qiao.regress.divergence import Divergence
from qiao.regress.figures import Figure, figures_by_tag, figures_of
from qiao.regress.models import Answer, Facts
from qiao.regress.page import render
from qiao.regress.report import make_report, tag_rows, worst
from qiao.regress.results import Alternative, CaseResult, Split, first_difference
from qiao.regress.run import Comparison
from qiao.regress.thresholds import METRICS, judge

NONE = Divergence.joined([])


def divergence(kl, same=None, base=None, other=None):
    count = len(kl)
    return Divergence(
        np.array(kl, np.float64),
        np.array(same if same is not None else [True] * count, np.bool_),
        np.array(base if base is not None else [-1.0] * count),
        np.array(other if other is not None else [-1.0] * count),
    )


def answer(text):
    return Answer(list(range(len(text))), list(text), text, True)


SUITE = read_suite(
    "\n".join(
        [
            '{"id": "a", "prompt": "1+1", "tags": ["sum"], "check": {"numeric": 2}}',
            '{"id": "b", "prompt": "1+2", "tags": ["sum", "<i>"], "check": {"numeric": 3}}',
            '{"id": "<script>", "prompt": "</div><script>alert(1)</script>", "reference": "r"}',
        ]
    ),
    "s",
)
RESULTS = [
    CaseResult(SUITE.cases[0], answer("2"), answer("3"), divergence([0.5, 0.1], [False, True]), NONE, Split(0)),
    CaseResult(SUITE.cases[1], answer("4"), answer("3 mg"), divergence([0.2]), NONE, Split(0)),
    CaseResult(
        SUITE.cases[2],
        answer("<b>"),
        answer("<b>"),
        divergence([0.0, 0.0, 0.0]),
        divergence([0.25], [False], [-2.0], [-3.0]),
        None,
    ),
]


def comparison(results=RESULTS, text_only=False):
    facts = Facts("<base&model>", {"dtype": "float32"}, "cpu", "float32", "int8", ["w4a16"], 1000, 320)
    notes = [("vocabulary_cut", {"base": "3", "candidate": "4"})]
    return Comparison(SUITE, facts, facts, results, notes, text_only)


def test_divergence_is_the_formula():
    generator = torch.Generator().manual_seed(0)
    base, other = (torch.randn(50, 11, generator=generator) * 3 for _ in range(2))
    targets = torch.randint(0, 11, (50,), generator=generator)
    p, q = (np.exp(x.double().numpy()) / np.exp(x.double().numpy()).sum(-1, keepdims=True) for x in (base, other))
    found = Divergence.between(base, other, targets)
    np.testing.assert_allclose(found.kl, (p * np.log(p / q)).sum(-1))
    np.testing.assert_array_equal(found.same_top, p.argmax(-1) == q.argmax(-1))
    np.testing.assert_allclose(found.logprob, np.log(q[np.arange(50), targets.numpy()]))
    np.testing.assert_allclose(found.base_logprob, np.log(p[np.arange(50), targets.numpy()]))


def test_equal_logits_have_exactly_no_divergence():
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(1)) * 9
    assert not Divergence.between(logits, logits.clone(), torch.zeros(40, dtype=torch.long)).kl.any()


def test_figures_by_tag():
    found = figures_by_tag(SUITE, RESULTS)
    assert list(found) == ["all", "sum", "<i>"]
    every, sums = found["all"], found["sum"]
    assert (every.cases, every.positions, every.checked, every.base_passes, every.candidate_passes) == (3, 7, 2, 1, 1)
    assert every.kl.value == pytest.approx((0.5 + 0.1 + 0.2 + 0.25) / 7)
    assert every.answer_kl.value == pytest.approx(0.8 / 6) and every.reference_kl.value == pytest.approx(0.25)
    assert every.top1.value == pytest.approx(5 / 7) and every.kl_max.value == 0.5
    assert every.lost.value == 1 and every.gained == 1 and every.changed.value == pytest.approx(2 / 3)
    assert every.base_perplexity == pytest.approx(math.exp(2)) and every.perplexity.value == pytest.approx(math.e - 1)
    assert sums.perplexity is None and sums.reference_kl is None
    assert every.numeric.value == 1.0 and sums.cases == 2


def test_intervals_are_the_bootstraps():
    """Whole cases are drawn: an interval written apart, with resampled indices, agrees."""
    random = np.random.default_rng(3)
    results = [
        replace(RESULTS[0], answer=divergence(random.exponential(0.3 + 0.4 * (i % 3), 4 + i % 5))) for i in range(60)
    ]
    figure = figures_of(results).kl
    index = random.integers(0, 60, (4000, 60))
    sums = np.array([r.answer.kl.sum() for r in results])[index].sum(1)
    counts = np.array([len(r.answer) for r in results])[index].sum(1)
    low, high = np.quantile(sums / counts, [0.025, 0.975])
    assert figure.low == pytest.approx(low, rel=0.05) and figure.high == pytest.approx(high, rel=0.05)
    assert figure.low < figure.value < figure.high
    assert figures_of(results).kl == figure, "the seed is fixed"


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


class TestThresholds:
    def test_a_later_one_replaces(self):
        found = parse_thresholds(["law: kl 0.02, top1 95%", "dosage: numeric 0", "law: kl 0.5"])
        assert [str(t) for t in found] == ["law: kl 0.5", "law: top1 0.95", "dosage: numeric 0"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("kl 0.1", "TAG: METRIC LIMIT"),
            ("law: kl", "metric and its limit"),
            ("law: klp99 0.1", "did you mean 'kl_p99'"),
            ("law: kl x", "number"),
            ("law: kl nan", "number"),
            ("law: kl -1", "at least 0"),
        ],
    )
    def test_what_is_wrong_is_said(self, text, message):
        with pytest.raises(ParameterError, match=message):
            parse_thresholds([text])

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("summ: kl 1", "did you mean 'sum'"),
            ("sum: perplexity 1", "reference"),
            ("<i>: lost 0", None),
        ],
    )
    def test_what_was_not_measured_cannot_hold(self, text, message):
        thresholds = parse_thresholds([text])
        if message is None:
            assert usable(thresholds, SUITE, False) == (thresholds, [])
        else:
            with pytest.raises(ParameterError, match=message):
                usable(thresholds, SUITE, False)

    def test_there_must_be_one(self):
        with pytest.raises(ParameterError, match="no verdict"):
            usable([], SUITE, False)
        with pytest.raises(ParameterError, match="texts alone"):
            usable(parse_thresholds(["all: kl 1"]), SUITE, True)
        judged, left = usable(parse_thresholds(["all: kl 1, changed 1"]), SUITE, True)
        assert [str(t) for t in judged] == ["all: changed 1"] and [str(t) for t in left] == ["all: kl 1"]

    @pytest.mark.parametrize("metric", METRICS)
    def test_each_metric_holds_at_its_value_and_breaks_beyond(self, metric):
        figures = figures_by_tag(SUITE, RESULTS)
        value = getattr(figures["all"], metric).value
        step = -1e-6 if METRICS[metric].at_least else 1e-6

        def holds(limit):
            threshold = replace(parse_thresholds([f"all: {metric} 0"])[0], limit=limit)
            return judge([threshold], figures)[0].holds

        assert holds(value) and holds(value + step) and not holds(value - step)

    def test_a_limit_inside_the_interval_is_close(self):
        figures = figures_by_tag(SUITE, RESULTS)
        figure = figures["all"].kl
        limits = [(figure.low + figure.value) / 2, figure.high * 2]
        close = [judge([replace(parse_thresholds(["all: kl 0"])[0], limit=x)], figures)[0].close for x in limits]
        assert close == [True, False]

    def test_other_counts_of_numbers_break_any_limit(self):
        results = [replace(RESULTS[0], candidate=answer("2 or 3")), *RESULTS[1:]]
        (judged,) = judge(parse_thresholds(["sum: numeric 1e9"]), figures_by_tag(SUITE, results))
        assert judged.figure == Figure(math.inf) and not judged.holds


class TestReport:
    def report(self, *texts, **options):
        return make_report(comparison(**options), parse_thresholds(texts))

    def test_the_verdict(self):
        assert self.report("all: kl 1, lost 1")["passes"]
        broken = self.report("all: kl 1, lost 0")
        assert not broken["passes"]
        assert [v["holds"] for v in broken["verdicts"]] == [True, False]

    def test_worst_first_and_equal_ones_not_at_all(self):
        report = self.report("all: kl 1")
        assert [case["id"] for case in report["cases"]] == ["a", "b", "<script>"]
        equal = [replace(r, candidate=r.base, answer=divergence([0.0]), reference=NONE) for r in RESULTS]
        assert worst(self.report("all: kl 1", results=equal)) == []

    def test_infinity_is_a_text(self):
        import json

        results = [replace(RESULTS[0], candidate=answer("no number")), *RESULTS[1:]]
        report = self.report("sum: numeric 0", results=results)
        assert json.loads(json.dumps(report, allow_nan=False))["verdicts"][0]["value"] == "inf"
        assert tag_rows(report)[0]["numeric"] == "∞"

    @pytest.mark.parametrize("language", ["en", "zh"])
    @pytest.mark.parametrize("text_only", [False, True])
    def test_the_page_stands_alone_and_is_escaped(self, language, text_only):
        split = Split(0, 0.5, 0.25, (Alternative('"<i>"', 0.5, 0.25),))
        results = [replace(RESULTS[0], split=split), RESULTS[1], replace(RESULTS[2], candidate=answer("<u>"))]
        if text_only:
            results = [replace(r, answer=NONE, reference=NONE, split=None) for r in results]
        thresholds = parse_thresholds(["all: changed 0.1", "sum: numeric 0"])
        report = make_report(comparison(results, text_only), thresholds, parse_thresholds(["all: kl 1"]))
        page = render(report, language)
        assert "<script" not in page and "<i>" not in page and "<b>&" not in page
        assert "&lt;script&gt;" in page and "&lt;base&amp;model&gt;" in page
        assert not [word for word in ("http:", "https:", "src=", "@import", "url(", "<link") if word in page]
        plots = page.split("<svg")[1:]
        assert len(plots) == (2 if text_only else 5)
        for plot in plots:
            ElementTree.fromstring("<svg" + plot.split("</svg>")[0] + "</svg>")
        assert "prefers-color-scheme: dark" in page
        assert ("未通过" if language == "zh" else "FAILS") in page

    def test_both_languages_have_the_same_texts(self):
        from qiao.regress.page import texts_of

        english, chinese = texts_of("en"), texts_of("zh")
        assert english.keys() == chinese.keys()
        for key, text in english.items():
            assert sorted(word for word in text.split("{")[1:]) is not None
            assert {w.split("}")[0] for w in text.split("{")[1:]} == {
                w.split("}")[0] for w in chinese[key].split("{")[1:]
            }
        with pytest.raises(ParameterError, match="--lang"):
            texts_of("fr")
