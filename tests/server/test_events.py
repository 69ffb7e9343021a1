"""What is made for every token without pydantic and without the metrics library equals what those make."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from qiao.observability.metrics import Tally
from qiao.server.protocol.chat import ChatChunk, ChunkChoice, Delta
from qiao.server.streaming import TextEvents, event

from tests.support.server import RunningServer

BASE: dict[str, Any] = {"id": 'chat-"\\', "created": 1, "model": "é\u2028", "system_fingerprint": "f"}


def made(text: str) -> bytes:
    choice = ChunkChoice(index=3, delta=Delta(content=text), logprobs=None, finish_reason=None)
    return event(ChatChunk(**BASE, object="chat.completion.chunk", choices=[choice], usage=None))


@settings(derandomize=True, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_filled_event_is_the_event(text: str) -> None:
    assert TextEvents(made).fill(text) == made(text)


def test_every_character_below_256_and_the_odd_ones_are_escaped_as_by_pydantic() -> None:
    text = "".join(map(chr, range(256))) + "\u2028\u2029\ufeff\ufffe\U0001f600"
    assert TextEvents(made).fill(text) == made(text)
    assert json.loads(TextEvents(made).fill(text).removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text


def _parsed(registry: CollectorRegistry, drop: str) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [s for f in families for s in f.samples if not s.name.endswith("_created")]
    return {(s.name.replace(drop, ""), s.labels.get("le", "")): s.value for s in samples}


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 4000).map(lambda i: i / 256)))
def test_a_tally_counts_as_the_librarys_histogram(values: list[float]) -> None:
    """Dyadic values, so that sums are exact in any order."""
    bounds, labels = (0.25, 1, 2.5, 10.0), {"engine": "0"}
    own, library = CollectorRegistry(), CollectorRegistry()
    tally = Tally(["a_x", "b_x"], "text", bounds, labels)
    own.register(tally)
    histogram = Histogram("a_x", "text", list(labels), buckets=bounds, registry=library).labels(**labels)
    for value in values:
        tally.observe(value)
        histogram.observe(value)
    expected = _parsed(library, "a_")
    found = _parsed(own, "a_")
    assert {k: v for k, v in found.items() if not k[0].startswith("b_")} == expected
    assert {(n.removeprefix("b_"), le): v for (n, le), v in found.items() if n.startswith("b_")} == expected


def test_streams_with_and_without_token_ids_bring_the_same_text(chained: RunningServer) -> None:
    """Two ways of writing events: filled templates, and models where the client sees more than text."""
    for path, own in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": [_USER]})):
        for options in ({}, {"include_usage": True}, {"continuous_usage_stats": True}):
            body = {**own, "cache_salt": "wide", "stream": True, "n": 2, "max_tokens": 20}
            if options:
                body["stream_options"] = options
            plain, shown = (_events(chained, path, {**body, "return_token_ids": ids}) for ids in (False, True))
            assert _texts(plain) == _texts(shown) == ["é漢😀y"] * 2
            usage = [chunk.get("usage", "absent") for chunk in plain[:-1]]
            assert all(isinstance(u, dict) if "continuous_usage_stats" in options else u in _NO_USAGE for u in usage)
            assert ("usage" in plain[0]) == bool(options)


_USER = {"role": "user", "content": "x"}
_NO_USAGE = (None, "absent")


def _events(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http().stream("POST", "/v1/" + path, json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def _texts(events: list[dict[str, Any]]) -> list[str]:
    choices = [choice for chunk in events for choice in chunk["choices"]]
    assert [c["finish_reason"] for c in choices].count("stop") == 2
    text = {0: "", 1: ""}
    for choice in choices:
        text[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return [text[0], text[1]]
