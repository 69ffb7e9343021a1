"""Goals: the best peer of the same format and model decides, in the right direction."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.comparison.targets import Verdict, judge
from tests.benchmarks.data import request, results, run


def verdict(data: dict[str, Any], cell: str, form: str = "4bit", size: str = "135m", figure: str = "") -> Verdict:
    return next(
        v
        for v in judge(data)
        if (v.target.cell, v.format, v.target.size) == (cell, form, size) and (not figure or v.target.figure == figure)
    )


@pytest.mark.parametrize(("own", "met"), [(250.0, True), (249.0, False)])
def test_a_rate_is_compared_with_the_best_peers_median(own: float, met: bool) -> None:
    data = results(
        *(run("qiao 4 bit", "single", number=i, decode_rate=own) for i in range(3)),
        *(run("openvino int4", "single", number=i, decode_rate=rate) for i, rate in enumerate((90.0, 100.0, 500.0))),
        run("llama.cpp Q4_0", "single", decode_rate=80.0),
        run("vllm bf16", "single", decode_rate=1000.0),  # another format
        run("llama.cpp Q4_0", "single", size="1b", decode_rate=1000.0),  # another model
    )
    found = verdict(data, "single")
    assert (found.best, found.best_peer, found.met) == (100.0, "openvino int4", met)
    assert found.ratio == pytest.approx(own / 100)


@pytest.mark.parametrize(("own", "met"), [(40.0, True), (60.0, False)])
def test_waiting_is_better_when_shorter(own: float, met: bool) -> None:
    data = results(
        run("qiao 4 bit", "poisson-0.6", requests=[request(own), request(own)]),
        run("openvino int4", "poisson-0.6", requests=[request(90.0), request(110.0)]),
        run("llama.cpp Q4_0", "poisson-0.6", requests=[request(500.0)]),
    )
    found = verdict(data, "poisson-0.6", figure="ttft_mean")
    assert (found.best, found.met) == (pytest.approx(100.0), met)


def test_memory_is_the_peak_over_cells_against_the_leanest() -> None:
    data = results(
        run("qiao 16 bit", "single", pss_mib=300.0),
        run("qiao 16 bit", "streams24", pss_mib=390.0),
        run("openvino fp16", "streams24", pss_mib=500.0),
        run("vllm bf16", "streams24", pss_mib=4000.0),
    )
    found = verdict(data, "", "16bit")
    assert (found.own, found.best, found.best_peer, found.met) == (390.0, 500.0, "openvino fp16", True)


def test_nothing_is_met_or_missed_without_both_figures() -> None:
    data = results(run("openvino int4", "single", decode_rate=1.0), run("qiao 16 bit", "single", decode_rate=1.0))
    assert verdict(data, "single", "4bit").met is None
    assert verdict(data, "single", "16bit").met is None
    assert all(v.met is None for v in judge(results()))
