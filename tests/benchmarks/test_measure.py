"""What is measured, what is left out and why, and what a server's log says about its failure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.comparison import measure
from benchmarks.comparison.measure import Results, measure_group
from benchmarks.comparison.servers import PEERS, Peer, first_error
from benchmarks.comparison.workload import CELLS
from tests.benchmarks.data import run

VLLM_LOG = """\
(APIServer pid=1) WARNING 11-30 11:03:22 [utils.py:255] This can cause fd limit errors like \
`OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n
(Worker pid=2) WARNING 11-30 11:03:39 [utils.py:597] Failed to create linear. Exception: no primitive
(Worker pid=2) ERROR 11-30 11:03:40 [executor.py:1063] Traceback (most recent call last):
(Worker pid=2) ERROR 11-30 11:03:40 [executor.py:1063]     raise ValueError: not this line, it is source
(Worker pid=2) ERROR 11-30 11:03:40 [executor.py:1063] AttributeError: no attribute 'cpu_gemm_wna16'
RuntimeError: Engine core initialization failed. See root cause above.
goodbye
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (VLLM_LOG, "AttributeError: no attribute 'cpu_gemm_wna16'"),
        ("loading\ntorch._C.OutOfMemoryError: no room\nbye", "torch._C.OutOfMemoryError: no room"),
        ("INFO all well\nunknown flag --x", "unknown flag --x"),
        ("", "it said nothing"),
    ],
)
def test_the_reason_is_the_first_error(log: str, said: str) -> None:
    assert first_error(log) == said


RATES = {
    "qiao 4 bit": (200, 400, 800),
    "openvino int4": (100, 200, 300),
    "llama.cpp Q4_0": (120, 150, 100),
    "vllm GPTQ": (40, 60, 900),
}
"""Tokens a second of a stream, of 8 and of 24; made up."""


def measured(monkeypatch: pytest.MonkeyPatch, short: bool, minutes: float = 60.0) -> tuple[Results, list[Any]]:
    """Three rounds on servers that answer at once with ``RATES``, each run of 10 s on a clock that it moves."""
    now = [0.0]
    order: list[Any] = []

    def start(results: Results, setting: Any, peer: Peer, stack: Any) -> Any:
        return SimpleNamespace(peer=peer)

    def one(results: Results, size: str, server: Any, servers: list[Any], cell: Any, number: int) -> None:
        why = measure._overloaded(results, size, server, servers, cell) or measure._slow(
            results, size, server, servers, cell
        )
        if why:
            results.skip(size=size, peer=server.peer.name, cell=cell.name, why=why)
            return
        single, eight, many = RATES[server.peer.name]
        rates = {"decode_rate": single, "full_rate": many if cell.name == "streams24" else eight}
        results.runs.append(run(server.peer.name, cell.name, number=number, wall_s=10.0, **rates))
        order.append((number, cell.name, server.peer.name))
        now[0] += 10.0 + measure.SETTLE_SECONDS + measure.CANCEL_SECONDS

    monkeypatch.setattr(measure, "_start", start)
    monkeypatch.setattr(measure, "_measure", one)
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Results, "write", lambda self: None)
    results = Results(Path("none"), {}, short=short)
    peers = [peer for peer in PEERS if peer.name in RATES]
    cells = [cell for cell in CELLS if cell.name in ("single", "streams8", "streams24")]
    measure_group(results, SimpleNamespace(size="135m"), peers, cells, 3, 60 * minutes)
    return results, order


def test_a_long_run_drops_who_is_far_behind_after_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    results, order = measured(monkeypatch, short=False)
    assert [entry for entry in order if entry[0] == 0] == [
        (0, cell, peer) for cell in ("single", "streams8", "streams24") for peer in RATES_ORDER
    ]
    later = {(cell, peer) for number, cell, peer in order if number == 2}
    assert ("streams24", "vllm GPTQ") in later  # the best there, however slow it is with a single stream
    assert later & {("single", "vllm GPTQ"), ("streams8", "vllm GPTQ"), ("streams24", "llama.cpp Q4_0")} == set()
    assert {("streams8", "llama.cpp Q4_0"), ("single", "openvino int4")} <= later  # 75 % and 83 % of the best
    why = next(s for s in results.skipped if s["cell"] == "single" and s["peer"] == "vllm GPTQ")["why"]
    assert why == "later rounds: 40 tokens/s in the first round, 120 at the best peer"


RATES_ORDER = tuple(peer.name for peer in PEERS if peer.name in RATES)


def test_a_short_run_keeps_the_best_peers_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    results, order = measured(monkeypatch, short=True)
    assert (0, "streams24", "vllm GPTQ") not in order and (0, "streams24", "llama.cpp Q4_0") in order
    later = {(cell, peer) for number, cell, peer in order if number == 1}
    assert later == {
        *((cell, "qiao 4 bit") for cell in ("single", "streams8", "streams24")),
        ("single", "llama.cpp Q4_0"),
        ("single", "openvino int4"),
        ("streams8", "openvino int4"),
        ("streams24", "openvino int4"),
    }
    left = {(s["cell"], s["peer"]) for s in results.skipped}
    everything = {(cell, peer) for cell in ("single", "streams8", "streams24") for peer in RATES}
    assert left == everything - later


def test_a_round_starts_only_if_what_is_left_of_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve parts of 11.3 s, then seven: 2.3 minutes, then 1.3."""
    _, order = measured(monkeypatch, short=True, minutes=3.5)
    assert max(number for number, _, _ in order) == 1
    results, order = measured(monkeypatch, short=True, minutes=3.2)
    assert max(number for number, _, _ in order) == 0
    assert any(s["why"] == "rounds after 1: no time left" for s in results.skipped)
