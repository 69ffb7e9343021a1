"""What the front end refuses of a constraint before the engine sees it, and what it remembers of it."""

from __future__ import annotations

import gc
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.errors import ParameterError
from qiao.frontend.grammar import MAX_KEPT, MAX_KEPT_CHARACTERS, GrammarChecker
from qiao.frontend.patterns import check_pattern
from qiao.structured_outputs import StructuredOutputsParams

# What Python's re refuses as "multiple repeat" or "nothing to repeat", and what multiplies.
REFUSED = ["foo**", "a+*", "a{2}{3}", "a*??", "(a)**", "[a]+*", r"\d{2}*", "a?{2}", "a++", "a?+", "a{2}+"]
LARGE = ["(a{1,5000}){1,5000}", "((a{99}){999}){99}", "(ab){500001}", "a{99999999999999999999}"]
TAKEN = [
    *("a*?", "a+?", "a??", "a{1,3}?", "(a*)*", "(?:a+)+", "[*+?]+", r"\*\*", r"a\++", "[]*]*", "[^]+]*", "(?P<n>a*)+"),
    *("[[:alpha:]*]*", r"\p{L}{2}", "a|b*|c+", "(?i:a)*", "(a{1,900}){1,900}", "[a{2}{3}]", "x" * 1000, "a{,3}"),
]


@pytest.mark.parametrize("pattern", REFUSED)
def test_two_repeats_in_a_row_are_refused(pattern: str) -> None:
    """B111: the library takes them, in a meaning that may not be the writer's."""
    with pytest.raises(ParameterError, match="field: has two repeats"):
        check_pattern(pattern, "field")


@pytest.mark.parametrize("pattern", LARGE)
def test_counts_that_multiply_are_refused(pattern: str) -> None:
    with pytest.raises(ParameterError, match="field: repeats more than 1000000 characters"):
        check_pattern(pattern, "field")


@pytest.mark.parametrize("pattern", TAKEN)
def test_others_are_taken(pattern: str) -> None:
    check_pattern(pattern, "field")


PARTS = ["a", "*", "+", "?", "{2}", "{1,3}", "(", ")", "[*]", r"\*", "|", "(?:"]


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join))
def test_what_python_calls_a_multiple_repeat(pattern: str) -> None:
    """Python's own parser decides; it alone has possessive repeats."""
    if re.search(r"[*+?}]\+", pattern):
        return
    try:
        re.compile(pattern)
        refused = False
    except re.error as error:
        if "multiple repeat" not in error.msg:
            return
        refused = True
    try:
        check_pattern(pattern, "field")
    except ParameterError:
        assert refused, pattern
    else:
        assert not refused, pattern


@pytest.mark.parametrize("piece", ["[a", "a?", "[\\", "\\p{", "(?<", "{1", "(", "a{1,9}", "[[:"])
def test_long_patterns_are_read_in_one_pass(piece: str) -> None:
    """131,072 characters are allowed; reading them twice for each would take minutes of processor time."""
    began = time.process_time()
    check_pattern(piece * (120_000 // len(piece)), "field")
    assert time.process_time() - began < 20.0


@pytest.mark.parametrize("schema", [False, True, "false", {"maximum": 10**400}, {"properties": {"a": 10**400}}])
def test_what_the_library_calls_no_schema_is_refused(schema: object) -> None:
    """It raises while it reads the schema, ahead of its own check."""
    with pytest.raises(ParameterError, match="guided_json: cannot be enforced"):
        GrammarChecker().grammar(StructuredOutputsParams(json=schema, origin="guided_json"))


def test_what_is_remembered_is_bounded_in_characters() -> None:
    checker = GrammarChecker()
    for number in range(60):
        checker.grammar(StructuredOutputsParams(choice=[f"{number:06d}" + "a" * 99_000]))
    assert MAX_KEPT_CHARACTERS / 2 < checker.kept <= MAX_KEPT_CHARACTERS


def test_what_is_refused_does_not_stay_in_memory() -> None:
    """An exception that is kept holds the frames that it passed, and so each schema that was refused."""

    class Marked(dict[str, object]):
        pass

    checker = GrammarChecker()
    for _ in range(3):
        for number in range(5):
            with pytest.raises(ParameterError, match="nothing"):
                checker.grammar(StructuredOutputsParams(json=Marked({"type": "nothing", "title": str(number)})))
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, Marked)]
    assert MAX_KEPT > 5
    assert 0 < checker.kept < 5_000
