"""Tool parsers: what each format means, and that it means the same however the text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.answers import TOOL_PARSERS, AnswerParser, NamedParser, Parts, RequiredParser
from qiao.answers.base import ToolParser, typed

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "f": {"type": "object", "properties": {"x": {"type": ["number", "null"]}, "on": {"type": "boolean"}, "o": {}}},
}
PARIS = ("get_weather", {"city": "Paris", "days": 3})
F = ("f", {"x": None, "on": True, "o": {"a": [1, "</tool_call>"]}})


def read(parser: ToolParser | None, *texts: str, several: bool = True) -> Parts:
    answer, whole = AnswerParser(tools=parser, several=several), Parts()
    for text in texts:
        whole.add(answer.push(text))
    whole.add(answer.finish())
    return whole


def plain(parts: Parts) -> tuple[str, list[tuple[str | None, Any]]]:
    return parts.content, [(call.name, json.loads(call.arguments)) for call in parts.calls]


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{dump({'name': name, 'arguments': arguments})}\n</tool_call>"


def unquoted(value: Any) -> str:
    return value if isinstance(value, str) else dump(value)


def qwen_xml(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(f"<parameter={k}>\n{unquoted(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def qwen_bare(name: str, arguments: dict[str, Any]) -> str:
    return qwen_xml(name, arguments).removeprefix("<tool_call>\n")


def glm(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{unquoted(v)}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{inner}</tool_call>"


def glm_json(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{name}\n{dump(arguments)}</tool_call>"


def deepseek(name: str, arguments: dict[str, Any]) -> str:
    body = f"function<｜tool▁sep｜>{name}\n```json\n{dump(arguments)}\n```"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def deepseek31(name: str, arguments: dict[str, Any]) -> str:
    body = f"{name}<｜tool▁sep｜>{dump(arguments)}"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def internlm(name: str, arguments: dict[str, Any]) -> str:
    return f"<|action_start|><|plugin|>\n{dump({'name': name, 'parameters': arguments})}<|action_end|>"


def mistral(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{dump(arguments)}"


MARKED = [
    ("hermes", hermes),
    ("qwen3", hermes),
    ("qwen3", qwen_xml),
    ("qwen3_coder", qwen_bare),
    ("glm45", glm),
    ("glm4", glm_json),
    ("deepseek_v3", deepseek),
    ("deepseek_v31", deepseek31),
    ("internlm", internlm),
    ("mistral", mistral),
]


@pytest.mark.parametrize(("name", "write"), MARKED)
def test_calls_between_marks(name: str, write: Any) -> None:
    one, two = write(*PARIS), write(*F)
    made = TOOL_PARSERS[name]
    assert plain(read(made(TOOLS), one)) == ("", [PARIS])
    assert plain(read(made(TOOLS), f"I look.\n\n{one}\n{two}")) == ("I look.", [PARIS, F])
    assert plain(read(made(TOOLS), one, "\n", two, several=False)) == ("", [PARIS])
    assert plain(read(made(TOOLS), "No call <here> [at] all. ")) == ("No call <here> [at] all. ", [])
    if name != "mistral":  # whose calls go on to the end
        content, calls = plain(read(made(TOOLS), f"{one} And so."))
        assert (content.strip(), calls) == ("And so.", [PARIS])


def test_lists_of_mistral() -> None:
    calls = [{"name": n, "arguments": a} for n, a in (PARIS, F)]
    assert plain(read(TOOL_PARSERS["mistral"](TOOLS), f"Hm.[TOOL_CALLS] {dump(calls)}")) == ("Hm.", [PARIS, F])
    ids = [AnswerParser(tools=None, new_id=TOOL_PARSERS["mistral"].new_id)._new_id() for _ in range(3)]
    assert all(len(i) == 9 and i.isalnum() for i in ids)


def test_answers_that_are_calls() -> None:
    llama, anything = TOOL_PARSERS["llama3_json"], TOOL_PARSERS["json"]
    one = dump({"name": PARIS[0], "parameters": PARIS[1]})
    two = dump({"name": F[0], "arguments": F[1]})
    for made in (llama, anything):
        assert plain(read(made(TOOLS), f" {one}")) == ("", [PARIS])
        assert plain(read(made(TOOLS), f"{one}; {two}")) == ("", [PARIS, F])
        assert plain(read(made(TOOLS), f"[{one}, {two}]")) == ("", [PARIS, F])
        other = '{"name": "unknown", "parameters": {}}'
        assert plain(read(made(TOOLS), other)) == (other, [])
        assert plain(read(made(TOOLS), f"Well: {one}")) == (f"Well: {one}", [])
    assert plain(read(llama(TOOLS), f"<|python_tag|>{one}")) == ("", [PARIS])
    assert plain(read(anything(TOOLS), f"```json\n{one}\n```")) == ("", [PARIS])


BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": }}</tool_call> so'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", "<tool_call>" + "[" * 3000 + "</tool_call>"),
    ("hermes", "<tool_call>"),
    ("qwen3", "<tool_call><function=f><parameter=x>1</function></tool_call>"),
    ("qwen3", "<tool_call>nonsense</tool_call>"),
    ("glm45", "<tool_call>f\n<arg_key>x</arg_key></tool_call>"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f {}<｜tool▁call▁end｜>"),
    ("mistral", '[TOOL_CALLS][{"name": "f"'),
    ("mistral", '[TOOL_CALLS]f{"x": 1} and so on'),
    ("internlm", "<|action_start|><|plugin|>f()<|action_end|>"),
    ("json", '{"name": "f", "arguments": {'),
    ("llama3_json", '{"name": "f", "parameters": {}} Done.'),
]


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_not_well_formed_is_content(name: str, text: str) -> None:
    assert plain(read(TOOL_PARSERS[name](TOOLS), text)) == (text, [])
    with_good = text + "\n" + hermes(*PARIS)
    if name == "hermes" and text.endswith("</tool_call>"):
        assert plain(read(TOOL_PARSERS[name](TOOLS), with_good)) == (text, [PARIS])


def test_a_call_whose_end_mark_was_cut_off_counts() -> None:
    text = hermes(*PARIS).removesuffix("</tool_call>")
    assert plain(read(TOOL_PARSERS["hermes"](TOOLS), text)) == ("", [PARIS])


def test_arguments_are_text_that_can_be_sent() -> None:
    (call,) = read(
        TOOL_PARSERS["hermes"](TOOLS), '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"\\\\ud800 漢\\"}"}'
    ).calls
    assert call.arguments.encode().isascii()
    assert json.loads(call.arguments) == {"x": "\ud800 漢"}


FRAGMENTS = [
    *(write(*call) for _, write in MARKED for call in (PARIS, F)),
    *(text for _, text in BROKEN if len(text) < 200),
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "</function>",
        "[TOOL_CALLS]",
        "<｜tool▁calls▁end｜>",
        "<|action_end|>",
    ),
    *(" ", "\n", "text", "{", "}", "[", "漢", '{"name": "f", "arguments": {}}', "```json\n", "<|python_tag|>", "<tool"),
]


@settings(max_examples=400, derandomize=True, deadline=None)
@given(
    name=st.sampled_from(sorted(TOOL_PARSERS)),
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=5),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    several=st.booleans(),
    single=st.booleans(),
)
def test_a_stream_gives_what_the_whole_gives(
    name: str, parts: list[str], cuts: list[int], several: bool, single: bool
) -> None:
    text = "".join(parts)
    places = range(len(text) + 1) if single else sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = read(TOOL_PARSERS[name](TOOLS), text, several=several)
    assert plain(read(TOOL_PARSERS[name](TOOLS), *pieces, several=several)) == plain(whole)
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not whole.calls:
        assert _without_dropped(name, whole.content) == _without_dropped(name, text)


def _without_dropped(name: str, text: str) -> str:
    for mark in getattr(TOOL_PARSERS[name], "dropped", ()):
        text = text.replace(mark, "")
    return text


@settings(max_examples=100, derandomize=True, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=10), spaces=st.booleans(), end=st.integers(0, 200))
def test_forced_calls_by_any_cut(cuts: list[int], spaces: bool, end: int) -> None:
    calls = [{"name": n, "parameters": a} for n, a in (PARIS, F)]
    text = json.dumps(calls, indent=1 if spaces else None)
    cut = text[: max(1, len(text) - end)] if end > 100 else text
    places = sorted({0, len(cut), *(min(c, len(cut)) for c in cuts)})
    pieces = [cut[a:b] for a, b in itertools.pairwise(places)]
    assert plain(read(RequiredParser(TOOLS), *pieces)) == plain(read(RequiredParser(TOOLS), cut))
    if cut == text:
        assert plain(read(RequiredParser(TOOLS), *pieces)) == ("", [PARIS, F])
    named = read(NamedParser("f"), *pieces)
    assert [(c.name, c.arguments) for c in named.calls] == [("f", cut)]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5", {}, 5),
        ("five", {"type": "integer"}, "five"),
        ("null", {"type": ["string", "null"]}, None),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        ("true", {"enum": [True]}, True),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("[1", {"type": "array"}, "[1"),
        ("1e999", {"type": "number"}, "1e999"),
        ("-1e999", {"type": ["integer", "null"]}, "-1e999"),
        ("9" * 400, {"type": "integer"}, 10**400 - 1),
    ],
)
def test_unquoted_arguments_get_their_type(text: str, schema: Any, value: Any) -> None:
    assert typed(text, schema) == value
    assert type(typed(text, schema)) is type(value)
