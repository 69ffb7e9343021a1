"""What is sent: from the seed alone, within its ranges, at Poisson times."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest

from benchmarks.comparison.workload import CELLS, WORDS, Cell, quick, requests_of

BY_NAME = {cell.name: cell for cell in CELLS}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_same_seed_gives_the_same_requests_and_another_shares_no_prompt(cell: Cell) -> None:
    made = requests_of(cell, "135m", "round 0")
    assert made == requests_of(cell, "135m", "round 0")
    other = requests_of(cell, "135m", "round 1")
    assert not {r.prompt for r in made} & {r.prompt for r in other}
    assert len({tuple(r.prompt.split()[:8]) for r in made}) == len(made)  # no common beginning of eight words


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_lengths_are_in_range_and_prompts_have_as_many_words(cell: Cell) -> None:
    for request in requests_of(cell, "135m", "x"):
        assert cell.prompt[0] <= request.prompt_tokens <= cell.prompt[1]
        assert len(request.prompt.split(" ")) == request.prompt_tokens
        assert set(request.prompt.split(" ")) <= set(WORDS)
        assert cell.output[0] <= request.output_tokens <= cell.output[1]


def test_poisson_gaps_have_the_rate_and_the_spread_of_an_exponential() -> None:
    cell = replace(BY_NAME["poisson-2.2"], requests=4000, prompt=(1, 1))
    times = [request.at for request in requests_of(cell, "135m", "x")]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 2.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.06)  # equal for an exponential


def test_closed_loops_start_at_once_and_the_larger_model_gets_fewer_but_a_full_house() -> None:
    assert {request.at for request in requests_of(BY_NAME["streams8"], "135m", "x")} == {0.0}
    for cell in CELLS:
        if "1b" in cell.sizes:
            assert cell.concurrency <= len(requests_of(cell, "1b", "x")) < len(requests_of(cell, "135m", "x"))


def test_quick_keeps_the_kind_and_cuts_the_work() -> None:
    for cell in CELLS:
        short = quick(cell)
        assert (short.name, short.rate, short.prompt) == (cell.name, cell.rate, cell.prompt)
        assert short.requests == 2 and short.output[1] <= 16 and short.output[0] <= short.output[1]
