"""Figures of runs, against numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.comparison.stats import Timing, full_rate, median_of, percentile, pooled_ttft, summarise
from tests.benchmarks.data import request


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(float(np.percentile(values, share)), rel=1e-9, abs=1e-9)


def test_a_run_by_hand() -> None:
    timings = [
        Timing(ttft=0.5, last=1.5, seconds=1.6, prompt_tokens=100, completion_tokens=11, gaps=[0.1] * 10),
        Timing(ttft=1.5, last=5.5, seconds=5.6, prompt_tokens=100, completion_tokens=21, gaps=[0.2] * 20),
        Timing(error="status 500", seconds=0.1),
    ]
    figures = summarise(timings, wall=8.0)
    assert (figures["completed"], figures["failed"], figures["errors"]) == (2, 1, ["status 500"])
    assert figures["output_rate"] == pytest.approx(32 / 8)
    assert figures["tpot_ms"] == pytest.approx((100 + 200) / 2)  # 1 s over 10 tokens, 4 s over 20
    assert figures["decode_rate"] == pytest.approx(1 / 0.15)
    assert figures["ttft_mean_ms"] == pytest.approx(1000)
    assert figures["ttft_p95_ms"] == pytest.approx(1450)
    assert figures["prefill_rate"] == pytest.approx((100 / 1.6 + 100 / 5.6) / 2)
    assert figures["itl_p95_ms"] == pytest.approx(200)


def test_full_rate_counts_what_came_before_the_last_request_was_sent() -> None:
    first = Timing(sent=0.0, ttft=0.5, last=1.5, completion_tokens=20, gaps=[0.1] * 9)  # two tokens a text
    second = Timing(sent=0.0, ttft=0.95, last=2.95, completion_tokens=21, gaps=[0.1] * 20)
    third = Timing(sent=1.25, ttft=0.5, last=1.0, completion_tokens=6, gaps=[0.1] * 5)
    # until 1.25 s: texts of the first at 0.5, 0.6, ... 1.2; of the second at 0.95, 1.05, 1.15, 1.25; none of the third
    assert full_rate([first, second, third]) == pytest.approx((8 * 2 + 3 + 1) / 1.25, rel=0.06)
    assert full_rate([first, second]) is None and full_rate([]) is None


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(0.01, 1.0), max_size=30), st.floats(0.0, 2.0), st.floats(0.01, 2.0), st.floats(0.0, 40.0))
def test_tokens_come_one_after_the_other_and_all_in_the_end(
    gaps: list[float], sent: float, ttft: float, moment: float
) -> None:
    timing = Timing(sent=sent, ttft=ttft, completion_tokens=3 * (len(gaps) + 1), gaps=gaps)
    assert timing.tokens_until(sent) == 0 and timing.tokens_until(1e6) == 3 * (len(gaps) + 1)
    assert 0 <= timing.tokens_until(moment) <= timing.tokens_until(moment + 1)


def test_one_token_has_no_decode_rate_and_failures_have_no_figures() -> None:
    single = summarise([Timing(ttft=0.2, last=0.2, seconds=0.25, prompt_tokens=1000, completion_tokens=1)], 0.25)
    assert single["decode_rate"] is None and single["prefill_rate"] == pytest.approx(4000)
    failed = summarise([Timing(error="x")], 1.0)
    assert failed["output_rate"] == 0 and failed["ttft_mean_ms"] is None and failed["prefill_rate"] is None


def test_median_of_leaves_out_rounds_without_the_figure() -> None:
    assert median_of([{"a": 1.0}, {"a": None}, {}, {"a": 5.0}, {"a": 2.0}], "a") == 2.0
    assert median_of([{}], "a") is None


def test_first_tokens_are_pooled_over_rounds_without_failures() -> None:
    rounds = [{"requests": [request(100.0), request(300.0)]}, {"requests": [request(200.0), request(9e9, "failed")]}]
    assert pooled_ttft(rounds) == pytest.approx((200.0, 290.0))
    assert pooled_ttft([{"requests": [request(None)]}]) is None
