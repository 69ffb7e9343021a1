"""Suites and checks: what is read, what is refused and where, and that no pattern takes the machine."""

from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.errors import ParameterError
from qiao.regress import BUILT_IN, load_suite, read_suite
from qiao.regress.checks import MAX_SECONDS, Check, largest_change, numbers

CASE = '{"id": "a", "prompt": "x"}'


def test_header_and_cases():
    text = '{"suite": "mine", "thresholds": ["all: kl 0.1"], "max_tokens": 9}\n\n' + "\n".join(
        [
            '{"id": "a", "prompt": "one", "reference": "two", "tags": ["law"], "max_tokens": 3}',
            '{"id": "b", "messages": [{"role": "user", "content": "hi"}], "tags": ["dosage", "law"]}',
        ]
    )
    suite = read_suite(text, "f.jsonl")
    assert (suite.header.suite, suite.header.thresholds) == ("mine", ["all: kl 0.1"])
    assert suite.tags == ["all", "law", "dosage"]
    assert (suite.tagged("all"), suite.tagged("law"), suite.tagged("dosage")) == ([0, 1], [0, 1], [1])
    assert [suite.max_tokens(case) for case in suite.cases] == [3, 9]
    assert [suite.limited(5).max_tokens(case) for case in suite.cases] == [3, 5]
    assert suite.cases[1].question == "user: hi"


def test_a_file_without_header_and_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("\ufeff" + CASE + "\r\n", encoding="utf-8")
    suite = load_suite(str(file))
    assert (suite.header.suite, len(suite.cases)) == ("mine", 1)


def test_a_line_separator_inside_a_text_is_no_end_of_line():
    """U+2028 and U+0085 may stand in JSON strings as they are."""
    suite = read_suite('{"id": "a", "prompt": "x\u2028y\u0085z"}', "f")
    assert suite.cases[0].prompt == "x\u2028y\u0085z"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ('{"prompt": "x"}', "id"),
        ('{"id": "", "prompt": "x"}', "id"),
        ('{"id": "b"}', "either prompt or messages"),
        ('{"id": "b", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}', "either prompt or messages"),
        ('{"id": "b", "prompt": ""}', "either prompt or messages"),
        ('{"id": "b", "messages": [{"role": "user"}]}', "content"),
        ('{"id": "b", "prompt": "x", "refrence": "y"}', "refrence"),
        ('{"id": "b", "prompt": "x", "reference": ""}', "reference"),
        ('{"id": "b", "prompt": "x", "tags": ["all"]}', "'all'"),
        ('{"id": "b", "prompt": "x", "tags": ["a: b"]}', "tag"),
        ('{"id": "b", "prompt": "x", "max_tokens": -1}', "max_tokens"),
        (CASE, "twice"),
        ('{"id": "b", "prompt": "x", "check": {}}', "exactly one"),
        ('{"id": "b", "prompt": "x", "check": {"exact": "a", "regex": "b"}}', "exactly one"),
        ('{"id": "b", "prompt": "x", "check": {"exact": "a", "tolerance": 1}}', "tolerance"),
        ('{"id": "b", "prompt": "x", "check": {"numeric": 1, "tolerance": -1}}', "tolerance"),
        ('{"id": "b", "prompt": "x", "check": {"regex": "("}}', "no regex"),
        ('{"id": "b", "prompt": "x", "check": {"regex": "' + "a" * 1001 + '"}}', "1001 characters"),
        ('{"id": "b", "prompt": "x", "check": {"contains": []}}', "contains"),
        ('{"id": "b", "prompt": "x", "check": {"contains": ["a", ""]}}', "contains"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(line, message):
    with pytest.raises(ParameterError, match=message) as caught:
        read_suite(CASE + "\n" + line, "f.jsonl")
    assert "f.jsonl, line 2" in str(caught.value)


@pytest.mark.parametrize("name", ["no/such.jsonl", "."])
def test_a_suite_that_is_not_there(name):
    with pytest.raises(ParameterError, match="en or zh"):
        load_suite(name)


def test_an_empty_suite():
    with pytest.raises(ParameterError, match="0 cases"):
        read_suite('{"suite": "x"}\n', "f")


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_suites_that_come_with_qiao(name):
    """Each check can be met: the reference meets it; and can fail: an unrelated text does not."""
    suite = load_suite(name)
    assert 40 <= len(suite.cases) <= 80
    assert suite.tags == ["all", "law", "dosage", "official", "arithmetic", "knowledge"]
    for case in suite.cases:
        assert case.check is not None and case.reference is not None, case.id
        assert case.check.passes(case.reference), case.id
        assert not case.check.passes("I cannot say; 我不知道。 -987654"), case.id
    if name == "zh":
        assert all(any("\u4e00" <= char <= "\u9fff" for char in case.question) for case in suite.cases)


class TestChecks:
    @pytest.mark.parametrize(
        ("check", "yes", "no"),
        [
            (Check(exact="Paris"), [" Paris\n"], ["paris", "Paris."]),
            (Check(contains="Paris"), ["in PARIS.", "ｐａｒｉｓ"], ["Pari s"]),
            (Check(contains=["5 mL", "8"]), ["8 h, 5 ml"], ["5 mL"]),
            (Check(regex=r"(?i)\bvot"), ["to Vote"], ["pivot"]),
            (
                Check(numeric=1500),
                ["1500 mg", "1,500", "about １５００。", "1.5e3", "每天1500毫克"],
                ["15000", "1501", "-1500"],
            ),
            (Check(numeric=0.3, tolerance=0.05), ["0.25", "0.35", ".0 and 0.3"], ["0.36", "none"]),
            (Check(numeric=-2), ["-2", "−2 °C", "is -2."], ["2", "4-2"]),
        ],
    )
    def test_what_passes(self, check, yes, no):
        assert [text for text in yes if not check.passes(text)] == []
        assert [text for text in no if check.passes(text)] == []

    def test_a_pattern_that_explodes_is_stopped(self):
        check = Check(regex=r"(a|aa)+$")
        before = time.process_time()
        with pytest.raises(ParameterError, match="nested repeats"):
            check.passes("a" * 200 + "b")
        assert time.process_time() - before < 20 * MAX_SECONDS  # without the limit it would not end

    @settings(derandomize=True, max_examples=200, deadline=None)
    @given(st.lists(st.one_of(st.integers(-(10**9), 10**9), st.floats(-1e6, 1e6).map(lambda x: round(x, 4)))))
    def test_numbers_come_back(self, values):
        text = ", then ".join(format(value, "f") if isinstance(value, float) else str(value) for value in values)
        assert numbers(text) == pytest.approx([float(value) for value in values])

    @settings(derandomize=True, max_examples=100, deadline=None)
    @given(st.lists(st.integers(-999, 999), min_size=1), st.data())
    def test_the_largest_change(self, values, data):
        other = [value + data.draw(st.integers(-5, 5)) for value in values]
        one, two = (" and ".join(map(str, numbers_)) for numbers_ in (values, other))
        assert largest_change(one, two) == max(abs(x - y) for x, y in zip(values, other, strict=True))
        assert largest_change(one, two + " and 7") == math.inf
        assert largest_change(one, one) == 0.0

    def test_the_expectation_in_words(self):
        checks = [Check(exact="a"), Check(contains=["a", "b"]), Check(regex="x+"), Check(numeric=2.5, tolerance=0.5)]
        assert [check.expected() for check in checks] == ["a", "a + b", "x+", "2.5 ± 0.5"]


def test_lines_are_json(tmp_path):
    """The suites can be read by anything that reads JSON lines."""
    from importlib.resources import files

    for name in BUILT_IN:
        lines = files("qiao.regress").joinpath("suites").joinpath(f"{name}.jsonl").read_text("utf-8").splitlines()
        assert len([json.loads(line) for line in lines]) == len(load_suite(name).cases) + 1
