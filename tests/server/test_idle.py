"""An idle server sleeps (public case B118): measured in processor time, which other load does not change."""

from __future__ import annotations

import time

import psutil

from tests.support.server import RunningServer

SECONDS = 3.0


def _processor_seconds(processes: list[psutil.Process]) -> float:
    return sum(t.user + t.system for t in (p.cpu_times() for p in processes))


def test_an_idle_server_uses_under_two_percent_of_a_core(rand: RunningServer) -> None:
    rand.http().post("/v1/completions", json={"model": rand.openai().models.list().data[0].id, "prompt": "ab"})
    front = psutil.Process(rand.process.pid)
    processes = [front, *front.children(recursive=True)]
    assert len(processes) >= 2, "the engine is a process of its own"
    rand.wait_for(lambda: rand.metric("vllm:num_requests_running") == 0)
    before = _processor_seconds(processes)
    time.sleep(SECONDS)  # the span that is measured
    assert _processor_seconds(processes) - before < 0.02 * SECONDS
