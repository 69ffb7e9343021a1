"""Reasoning told from content, with every way in which a template may have begun it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.answers import REASONING_PARSERS, TOOL_PARSERS, AnswerParser, Parts, ReasoningSplitter


def read(name: str, prompt: str, *texts: str, thinking: bool | None = None, tools: bool = False) -> Parts:
    form = REASONING_PARSERS[name]
    splitter = ReasoningSplitter(form, form.begins_in(prompt, thinking))
    answer = AnswerParser(splitter, TOOL_PARSERS["hermes"]({}) if tools else None)
    whole = Parts()
    for text in texts:
        whole.add(answer.push(text))
    whole.add(answer.finish())
    return whole


CASES = [
    ("deepseek_r1", "user<think>\n", "hm\n</think>\n\nYes.", "hm", "Yes."),
    ("deepseek_r1", "user", "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
    ("deepseek_r1", "user", "hm</think>Yes.", "hm", "Yes."),
    ("deepseek_r1", "user", "hm", "hm", ""),
    ("qwen3", "user\n", "<think>\n\nhm\n\n</think>\n\nYes. ", "hm", "Yes. "),
    ("qwen3", "user<think>\n", "hm </think> Yes.", "hm", "Yes."),
    ("qwen3", "user<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("qwen3", "user\n", "Yes.", "", "Yes."),
    ("qwen3", "user\n", " <thin", "", " <thin"),
    ("qwen3", "user\n", "<think>a < b </thin", "a < b </thin", ""),
    ("qwen3", "user\n", "<think>a\n\nb</think>", "a\n\nb", ""),
    ("glm45", "<|assistant|>\n<think></think>", "\nYes.", "", "\nYes."),
    ("glm45", "<|assistant|>", "\n<think>hm</think>\nYes.", "hm", "Yes."),
    ("glm45", "<|assistant|>", "", "", ""),
]


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        parts = read(name, prompt, *pieces)
        assert (parts.reasoning, parts.content) == (reasoning, content)


def test_a_request_that_wants_no_thinking() -> None:
    assert read("deepseek_r1", "user", "Yes.", thinking=False).content == "Yes."
    assert read("deepseek_r1", "user<think>", "hm</think>Yes.", thinking=False).reasoning == "hm"


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parts = read("qwen3", "", f"<think>maybe {call}?</think>\n{call}", tools=True)
    assert parts.reasoning == f"maybe {call}?"
    assert [(c.name, c.arguments) for c in parts.calls] == [("f", "{}")]
    assert parts.content == ""


PIECES = ["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "漢", '<tool_call>{"name": "f"}</tool_call>']


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    name=st.sampled_from(sorted(REASONING_PARSERS)),
    prompt=st.sampled_from(["", "<think>\n", "<think></think>"]),
    parts=st.lists(st.sampled_from(PIECES), max_size=10),
    cuts=st.lists(st.integers(0, 120), max_size=12),
    tools=st.booleans(),
)
def test_a_stream_gives_what_the_whole_gives(
    name: str, prompt: str, parts: list[str], cuts: list[int], tools: bool
) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole, joined = (read(name, prompt, *given_, tools=tools) for given_ in ([text], pieces))
    assert (whole.reasoning, whole.content) == (joined.reasoning, joined.content)
    assert [c.arguments for c in whole.calls] == [c.arguments for c in joined.calls]
