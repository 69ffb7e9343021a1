"""When two greedy answers count as equal, as a near tie, and as wrong."""

from __future__ import annotations

import pytest

from benchmarks.comparison.greedy import NEAR, Answer, Parting, parting, verdict


def answer(*steps: dict[int, float]) -> Answer:
    """Each step takes its likeliest token."""
    return Answer([max(step, key=lambda token: step[token]) for step in steps], list(steps))


SURE, TIE = {1: -0.1, 2: -3.0}, {1: -0.70, 2: -0.71}
TURNED = {1: -0.705, 2: -0.70}
OTHER = {2: -0.1, 1: -3.0}
FAR = {3: -0.1, 4: -3.0}


def test_equal_answers() -> None:
    assert parting(0, answer(SURE, TIE), answer(SURE, TIE)) is None


@pytest.mark.parametrize(
    ("first", "second", "near"),
    [((TIE,), (TURNED,), True), ((SURE,), (OTHER,), False), ((TIE,), (OTHER,), False), ((TIE,), (FAR,), False)],
)
def test_both_sides_must_find_the_two_tokens_alike(first: tuple, second: tuple, near: bool) -> None:
    found = parting(3, answer(SURE, *first, SURE), answer(SURE, *second, OTHER))
    assert found is not None and (found.prompt, found.position) == (3, 1)
    assert found.near(0.02) == near


def test_gaps_are_each_sides_own() -> None:
    found = parting(0, answer(TIE), answer(TURNED))
    assert isinstance(found, Parting) and found.tokens == (1, 2)
    assert found.logprobs == ((-0.70, -0.71), (-0.705, -0.70))
    assert found.gaps == (pytest.approx(0.01), pytest.approx(0.005))
    far = parting(0, answer(TIE), answer(FAR))
    assert far is not None and far.gaps == (None, None)


def test_a_shorter_answer_is_wrong() -> None:
    found = verdict([answer(SURE, SURE)], [answer(SURE)], "float16")
    assert not found["passed"] and found["wrong"][0]["position"] == 1


def test_the_verdict_counts() -> None:
    first = [answer(SURE, SURE), answer(SURE, TIE, SURE), answer(SURE, SURE)]
    second = [answer(SURE, SURE), answer(SURE, TURNED, OTHER), answer(OTHER, SURE)]
    found = verdict(first, second, "float16")
    assert (found["prompts"], found["equal"], found["compared_tokens"]) == (3, 1, 3)
    assert [one["prompt"] for one in found["near_ties"]] == [1] and [one["prompt"] for one in found["wrong"]] == [2]
    assert not found["passed"] and found["near_limit"] == NEAR["float16"]
    assert verdict(first[:2], second[:2], "float16")["passed"]
