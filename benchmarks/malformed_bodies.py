"""Good bodies for each POST route, and ways to spoil them: wrong types, bombs, huge arrays.

All that is drawn comes from the caller's generator.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

MODEL = "M"

USER = [{"role": "user", "content": "Say hi."}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
CHAT = {"model": MODEL, "messages": USER, "max_tokens": 2}

BASES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        COMPLETION,
        {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}, "logprobs": 1, "n": 2, "seed": 1},
        {**COMPLETION, "prompt": [5, 6, 7], "echo": True, "stop": ["x"], "logit_bias": {"5": 1.0}, "temperature": 0.5},
    ],
    "/v1/chat/completions": [
        CHAT,
        {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 2, "stop": ["x", "y"], "stop_token_ids": [3]},
        {**CHAT, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {
            "model": MODEL,
            "max_tokens": 2,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "short"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "nothing"},
            ],
        },
    ],
    "/v1/responses": [
        {"model": MODEL, "input": "hi", "max_output_tokens": 2},
        {"model": MODEL, "input": USER, "max_output_tokens": 2, "stream": True, "instructions": "short"},
        {"model": MODEL, "input": "hi", "max_output_tokens": 2, "store": False, "text": {"format": {"type": "text"}}},
    ],
    "/v1/responses/input_tokens": [{"model": MODEL, "input": "hi"}],
    "/v1/responses/{response_id}/cancel": [{}],
    "/v1/messages": [
        {"model": MODEL, "messages": USER, "max_tokens": 2},
        {
            "model": MODEL,
            "max_tokens": 2,
            "stream": True,
            "system": [{"type": "text", "text": "short"}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        },
    ],
    "/v1/messages/count_tokens": [{"model": MODEL, "messages": USER}],
    "/v1/embeddings": [{"model": MODEL, "input": ["hi", "you"], "encoding_format": "base64"}],
    "/v1/score": [{"model": MODEL, "text_1": "hi", "text_2": ["you", "me"]}],
    "/v1/rerank": [{"model": MODEL, "query": "hi", "documents": ["you", "me"], "top_n": 1}],
    "/tokenize": [{"model": MODEL, "prompt": "hi"}, {"model": MODEL, "messages": USER}],
    "/detokenize": [{"model": MODEL, "tokens": [1, 2, 3]}],
    "/v1/load_lora_adapter": [{"lora_name": "nobody", "lora_path": "/nowhere/at/all"}],
    "/v1/unload_lora_adapter": [{"lora_name": "nobody"}],
    "/ping": [{}],
}
"""What is right for each route, so that what is wrong is known."""

GENERATING = ("/v1/completions", "/v1/chat/completions")

LENGTHS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
"""Without them an answer may be long: not wrong, only slow."""

WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, -0.0, 1e308, -1e308, 2**31, -(2**31), 2**63, 2**64, 10**400, float("nan")),
    *(float("inf"), float("-inf"), "", " ", "a" * 5000, "\x00", "\ud800", "\udfff\ud800", "0x10", "1e999", "null"),
    *([], {}, [None], [[]] * 100, [{}] * 100, ["x"] * 2000, list(range(3000)), {"a": None}, {"": {"": {"": []}}}),
    *("\u202e\u0000\ufffe", "🧨" * 500, "../../../etc/passwd", "${7*7}{{7*7}}", "'; drop table x; --", {"$ref": "#"}),
)
"""One value of each kind that a field may not expect; some are taken by some."""


def spoiled_field(rng: random.Random, path: str, fields: list[str]) -> Any:
    """A good body with one or two of the route's ``fields`` wrong."""
    body = copy.deepcopy(rng.choice(BASES.get(path, [{}])))
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(fields or ["model"])
        value = rng.choice(WRONG)
        body[name] = -5 if value is None and name in LENGTHS else value
    return body


def spoiled_place(rng: random.Random, path: str) -> Any:
    """A good body with a wrong value somewhere inside it, or with a part taken out."""
    body = copy.deepcopy(rng.choice(BASES.get(path, [{}])))
    places = list(_places(body))
    if not places:
        return rng.choice(WRONG)
    holder, key = rng.choice(places)
    if rng.random() < 0.2 and key not in LENGTHS:
        del holder[key]
    else:
        value = rng.choice(WRONG)
        holder[key] = -5 if value is None and key in LENGTHS else value
    return body


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in list(items):
        yield value, key
        yield from _places(one)


def large(rng: random.Random, path: str) -> Any:
    """A good body of a generating route with one huge array or text in it."""
    count = rng.choice((1_000, 20_000, 100_000))
    both: list[Callable[[], dict[str, Any]]] = [
        lambda: {"stop": [f"s{i}" for i in range(count)]},
        lambda: {"stop": ["a" * count]},
        lambda: {"logit_bias": {str(i): 1.0 for i in range(count)}},
        lambda: {"logit_bias": {f"x{i}": 1 for i in range(count)}},
        lambda: {"stop_token_ids": list(range(count))},
        lambda: {"allowed_token_ids": [-1] * count},
        lambda: {"bad_words": ["word"] * count},
        lambda: {"tools": [TOOL] * (count // 10), "tool_choice": "auto"},
        lambda: {"n": count},
        lambda: {"guided_choice": [f"c{i}" for i in range(count)]},
        lambda: {f"unknown{i}": i for i in range(count)},
        lambda: {"user": "u" * count, "cache_salt": "s" * count},
    ]
    prompts: list[Callable[[], dict[str, Any]]] = [
        lambda: {"prompt": ["x"] * max(count, 2000)},
        lambda: {"prompt": [[1]] * max(count, 2000)},
        lambda: {"prompt": list(range(count))},
        lambda: {"prompt": "long " * count},
    ]
    messages: list[Callable[[], dict[str, Any]]] = [
        lambda: {"messages": USER * max(count, 1000)},
        lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * count}]},
        lambda: {"messages": [{"role": "user", "content": "long " * count}]},
        lambda: {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}] * count}]},
    ]
    own = prompts if path == "/v1/completions" else messages
    return {**BASES[path][0], **rng.choice([*both, *own])()}


def token_ids(rng: random.Random) -> tuple[str, Any]:
    """A route and a body with token ids that do not exist."""
    bad = rng.choice([[-1], [10**9], [2**31], [2**63], [10**30], [1.5], ["1", 1], [True], [1, None], [[1], [-7]], [[]]])
    bad = bad * rng.choice((1, 3, 500))
    return rng.choice(
        [
            ("/v1/completions", {**COMPLETION, "prompt": bad}),
            ("/v1/completions", {**COMPLETION, "stop_token_ids": bad}),
            ("/v1/completions", {**COMPLETION, "allowed_token_ids": bad}),
            ("/v1/completions", {**COMPLETION, "logit_bias": {str(one): 1.0 for one in bad}}),
            ("/detokenize", {"model": MODEL, "tokens": bad}),
            ("/v1/embeddings", {"model": MODEL, "input": bad}),
        ]
    )


def regex(rng: random.Random) -> str:
    """A pattern that is wrong, or that a naive engine chokes on."""
    n = rng.choice((10, 200, 2000, 5000))
    return rng.choice(
        [
            *("foo**", "a**", "(a+)++", "(", ")", "[", "[z-a]", "*a", "a{2,1}", "(?P<n", "\\", "(?=a)b", "(a)\\1"),
            *("(?<=a)b", "\\p{Nothing}", "[[:nope:]]", "(?i", "a{99999999999999999999}", "\x00", "(?x) # \n", "\\b\\B"),
            *("(" * n + "a" + ")" * n, f"(a{{1,{n}}}){{1,{n}}}", "(a*)*b" * (n // 10), "(a|aa)+$", ".*" * (n // 10)),
            *(f"((a{{0,{n}}}){{0,{n}}}){{0,{n}}}", "|".join(f"w{i}" for i in range(n)), f"[ab]*a[ab]{{{n}}}"),
            *("(x+x+)+y", f"\\w{{{n}}}", f"(\\p{{L}}{{1,{n}}}\\s)*", "a?" * n + "a" * n, "(?:" + "[^a]" * n + ")"),
        ]
    )


def grammar(rng: random.Random) -> str:
    """Lark or GBNF that is wrong, endless or very large."""
    n = rng.choice((10, 500, 5000))
    return rng.choice(
        [
            *("start:", "start: start", "start: a\na: b\nb: a", "start: b", "root ::=", "root ::= root root", ":::"),
            *('start: "a" | start start', "%import common.X\nstart: X", '%ignore /a*/\nstart: "a"', "start: /(/", "{}"),
            *("start: " + " | ".join(f'"w{i}"' for i in range(n)), "start: " + '"a"? ' * n, "start: " + "(" * n),
            *("start: r0\n" + "\n".join(f'r{i}: r{i + 1} r{i + 1}\nr{i + 1}: "a"' for i in range(n // 10)),),
            *("start: " + f"/a{{1,{n}}}/ " * 20, f'start: "a"~1..{n * 1000}', "root ::= " + '"a" ' * n, "\ud800"),
            "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1} r{i + 1}\n" for i in range(n // 10)) + f'r{n // 10}: "a"',
        ]
    )


def schema(rng: random.Random) -> Any:
    """A JSON schema that is wrong, recursive, deep or very large."""
    n = rng.choice((30, 300, 3000))
    deep: Any = {"type": "null"}
    for _ in range(min(n, 400)):
        deep = {"type": "array", "items": deep}
    string = {"type": "string"}
    return rng.choice(
        [
            *(
                {"$ref": "#"},
                {"$ref": "#/nope"},
                {"$ref": "http://127.0.0.1:1/x"},
                {"$ref": "file:///etc/passwd"},
                deep,
            ),
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * n}}, "$ref": "#/$defs/a"},
            {"anyOf": [{"const": i} for i in range(n)]},
            {"oneOf": [{"type": "object", "properties": {f"p{i}": string}, "required": [f"p{i}"]} for i in range(n)]},
            {"allOf": [{"properties": {f"p{i}": string}} for i in range(min(n, 900))]},
            {"type": "object", "properties": {f"p{i}": string for i in range(n)}},
            {"type": "array", "minItems": n * 100_000, "items": string},
            {"type": "array", "minItems": 5, "maxItems": 2},
            {"type": "string", "minLength": n * 1000, "maxLength": n * 1_000_000},
            {"type": "string", "pattern": regex(rng)},
            {"type": "integer", "minimum": 10**300, "maximum": 10**301},
            {"type": "number", "multipleOf": 1e-300, "minimum": -1e300},
            {"enum": list(range(n))},
            *(
                {"enum": []},
                {"type": []},
                {"type": "nothing"},
                {"type": 5},
                {"properties": []},
                {"required": {}},
                [],
                7,
            ),
            *({"not": {}}, {"if": {}, "then": False}, {"patternProperties": {"(": {}}}, {"format": "nonsense"}, False),
            {"patternProperties": {f"^{i}.*": string for i in range(min(n, 500))}},
            {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": n},
        ]
    )


def constrained(rng: random.Random, kind: str) -> Any:
    """A chat or completion body that asks for ``kind``: regex, grammar or schema, under one of its names."""
    if kind == "regex":
        value: Any = regex(rng)
        fields = rng.choice([{"guided_regex": value}, {"structured_outputs": {"regex": value}}])
    elif kind == "grammar":
        value = grammar(rng)
        fields = rng.choice([{"guided_grammar": value}, {"structured_outputs": {"grammar": value}}])
    else:
        value = schema(rng)
        named = {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}
        tool = {"type": "function", "function": {"name": "f", "parameters": value}}
        fields = rng.choice(
            [
                {"guided_json": value},
                {"guided_json": json.dumps(value)},
                {"structured_outputs": {"json": value}},
                {"response_format": named},
                {"response_format": {**named, "json_schema": {"name": "n", "schema": value, "strict": False}}},
                {"tools": [tool], "tool_choice": "required"},
                {"structured_outputs": {"structural_tag": json.dumps({"structures": [value], "triggers": ["<"]})}},
            ]
        )
    return {**CHAT, **fields}


TEMPLATES = (
    "{% for i in range(999999999) %}a{% endfor %}",
    "{{ 'a' * 999999999 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages | map('upper') | join(',' * 9999999) }}",
    "{% set x = namespace(a=[1]) %}{% for i in range(64) %}{% set x.a = x.a + x.a %}{% endfor %}{{ x.a }}",
    "{% if %}",
    "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    "{% include '/etc/passwd' %}",
    "{{ raise_exception('no') }}",
)


def template(rng: random.Random) -> Any:
    """A chat body with a template of its own, or with values that the server's template trips over."""
    text = rng.choice(TEMPLATES)
    nested: Any = "x"
    for _ in range(rng.choice((5, 60, 200))):
        nested = {"a": nested, "b": []} if rng.random() < 0.1 else [nested]
    role = rng.choice(["root", "user\n", "<|im_end|>", "a" * 65, "system", "{{7*7}}", "tool"])
    return rng.choice(
        [
            {**CHAT, "chat_template": text},
            {**CHAT, "chat_template_kwargs": {"messages": [], "tools": text, "bos_token": nested}},
            {**CHAT, "chat_template_kwargs": {"add_generation_prompt": nested, "chat_template": text}},
            {**CHAT, "chat_template_kwargs": rng.choice(WRONG)},
            {**CHAT, "messages": [{"role": role, "content": text, "name": nested, "extra": nested}]},
            {**CHAT, "messages": [*USER, {"role": "assistant", "content": "a"}], "continue_final_message": True},
            {**CHAT, "documents": [{"text": text}]},
            {"model": MODEL, "messages": [{"role": role, "content": [{"type": "image_url", "image_url": nested}]}]},
        ]
    )
