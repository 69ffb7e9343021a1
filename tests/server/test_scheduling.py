"""The scheduler seen through HTTP, on a cache so small that requests must be preempted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import RunningServer, server


@pytest.fixture(scope="module")
def tight(rand_folder: Path) -> Iterator[RunningServer]:
    flags = ("--num-gpu-blocks-override", "8", "--max-num-seqs", "4", "--scheduling-policy", "priority")
    with server(rand_folder, "--dtype", "float32", *flags, "--check-integrity", "--threads", "1") as running:
        yield running


def ask(running: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    answer = running.http().post("/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def together(running: RunningServer, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ask(running, body), bodies))


def test_a_request_that_can_never_fit_is_refused_at_once(tight: RunningServer) -> None:
    """B033: 300 tokens, and a cache of 128; and a prompt that fits whose answer does not."""
    answer = tight.http().post("/v1/completions", json={"prompt": [5] * 300, "max_tokens": 4})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert ask(tight, {"prompt": "hi", "max_tokens": 2})["usage"]["completion_tokens"] == 2
    long_answer = tight.http().post("/v1/completions", json={"prompt": [5] * 100, "max_tokens": 100})
    assert long_answer.status_code == 400
    assert ask(tight, {"prompt": [5] * 100, "max_tokens": 28})["choices"][0]["finish_reason"] == "length"
    chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    assert tight.http().post("/v1/chat/completions", json=chat).json()["usage"]["total_tokens"] == 128


def test_preempted_by_priority_and_still_right(tight: RunningServer) -> None:
    """B035."""
    bodies = [{"prompt": [5] * 40, "max_tokens": 40, "priority": p, "return_token_ids": True} for p in (5, 4, 3, 0)]
    solo = ask(tight, bodies[0])["choices"][0]["token_ids"]
    before = tight.metric("vllm:num_preemptions_total")
    for answer in together(tight, bodies):
        assert answer["usage"]["completion_tokens"] == 40
        assert answer["choices"][0]["token_ids"] == solo
    assert tight.metric("vllm:kv_cache_usage_perc") == 0
    assert tight.metric("vllm:num_preemptions_total") >= before


def test_preemption_counts_tokens_once(tight: RunningServer) -> None:
    """B044: outputs with penalties equal solo runs."""
    bodies = [
        {"prompt": [i] * 3, "max_tokens": 60, "frequency_penalty": 0.5, "return_token_ids": True} for i in range(5, 11)
    ]
    solo = [ask(tight, body)["choices"][0]["token_ids"] for body in bodies]
    before = tight.metric("vllm:num_preemptions_total")
    crowd = together(tight, bodies)
    assert [one["choices"][0]["token_ids"] for one in crowd] == solo
    assert [one["usage"]["completion_tokens"] for one in crowd] == [60] * 6
    assert tight.metric("vllm:num_preemptions_total") > before
    assert tight.metric("vllm:kv_cache_usage_perc") == 0


def test_colliding_prompts_do_not_share_blocks(rand: RunningServer) -> None:
    """B041: pairs that a polynomial hash would confuse."""
    base = [40] * 32
    for m in (2, 31, 33, 37, 53, 101, 127, 131, 137, 256):
        other = [(40 + m) % 320, 39, *base[2:]]
        warm = {"prompt": other, "max_tokens": 4}
        ask(rand, {"prompt": base, "max_tokens": 1})
        got = ask(rand, warm)
        cold = ask(rand, {**warm, "cache_salt": f"cold {m}"})
        assert got["choices"] == cold["choices"]
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
