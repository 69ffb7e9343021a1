"""Answers that must follow a grammar: parsed and validated by others, under every condition that a batch may bring."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qiao.engine import Engine, EngineConfig, grammars
from qiao.engine.grammars import MAX_KEPT, MAX_USED, GrammarCompiler, GrammarState, Vocabulary, allowed_tokens
from qiao.engine.request import EngineRequest
from qiao.errors import OverloadedError, ParameterError
from qiao.frontend.grammar import GrammarChecker
from qiao.structured_outputs import StructuredOutputsParams

from tests.support.engine import VOCAB, Results, TinyModel, make_ops, request, run

EOS = VOCAB - 1
TEXT = Vocabulary([*(bytes([32 + i]) for i in range(VOCAB - 1)), b""], [], [EOS])
"""Id i is the printable ASCII character 32 + i; the last id is the end."""

FOREVER = {"type": "array", "items": {"enum": ["a", "bb", 1]}, "minItems": 3, "maxItems": 6}


def engine(read: Callable[[], Vocabulary] = lambda: TEXT, **config: Any) -> Engine:
    sizes: dict[str, Any] = {"num_blocks": 512, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    ops = make_ops()
    made = EngineConfig(**{**sizes, "max_model_len": 512, "vocab_size": VOCAB, "check_integrity": True, **config})
    return Engine(TinyModel(ops), ops, made, vocabulary=read)


def ask(name: str, prompt: Sequence[int] = (1, 2, 3), after: str = "", **params: Any) -> EngineRequest:
    """A request whose ``StructuredOutputsParams`` are among the keywords."""
    fields = {f: params.pop(f) for f in list(params) if f in StructuredOutputsParams.__struct_fields__}
    made = request(name, prompt, eos=[EOS], **{"max_tokens": 400, "temperature": 1.0, **params})
    made.grammar = GrammarChecker().grammar(StructuredOutputsParams(**fields))
    made.grammar_after = after
    return made


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(TEXT.tokens[i] for i in tokens).decode()


def finished(engine: Engine, *requests: EngineRequest) -> Results:
    results = run(engine, requests)
    assert not engine.has_work()
    return results


@pytest.fixture(scope="module")
def shared() -> Engine:
    return engine()


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    words = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=6)
    whole = st.integers(-1000, 1000)
    return st.one_of(
        st.sampled_from([{"type": "null"}, {"type": "boolean"}]),
        st.tuples(whole, whole).map(lambda ab: {"type": "integer", "minimum": min(ab), "maximum": max(ab)}),
        st.tuples(st.integers(0, 4), st.integers(0, 4)).map(
            lambda ab: {"type": "string", "minLength": min(ab), "maxLength": max(ab)}
        ),
        st.sampled_from(["^[a-c]{1,3}$", "^(x|yz)+w$", "^\\d{2}-\\d{2}$"]).map(
            lambda p: {"type": "string", "pattern": p, "maxLength": 20}
        ),
        st.lists(st.one_of(words, whole, st.none()), min_size=1, max_size=4).map(lambda v: {"enum": v}),
        words.map(lambda v: {"const": v}),
    )


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def made(properties: dict[str, Any], required: int) -> dict[str, Any]:
        names = list(properties)[: required % (len(properties) + 1)]
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}

    names = st.text("abcxyz \"\\'{}", min_size=1, max_size=3)
    return st.one_of(
        st.builds(made, st.dictionaries(names, inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda item, n: {"type": "array", "items": item, "maxItems": n}, inner, st.integers(0, 3)),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    )


SCHEMAS = st.recursive(leaves(), larger, max_leaves=6)


@settings(
    max_examples=120, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schema=SCHEMAS, compact=st.booleans(), seed=st.integers(0, 1 << 30), greedy=st.booleans())
def test_answers_parse_and_validate(shared: Engine, schema: Any, compact: bool, seed: int, greedy: bool) -> None:
    """Against ``json`` and ``jsonschema``, which know nothing of grammars."""
    how: dict[str, Any] = {"disable_any_whitespace": True} if compact else {"whitespace_pattern": " ?"}
    asked = ask("a", [seed % 90, 7], json=schema, seed=seed, temperature=0.0 if greedy else 1.0, n=1, **how)
    results = finished(shared, asked)
    assert results.reasons["a", 0] == "stop"
    value = json.loads(text_of(results.of("a")))
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator)


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pattern=st.from_regex(r"([a-d]{1,2}[+?]?|\[x-z\]\{1,3\}|\([ab]\|cd\)\?){1,4}", fullmatch=True),
    seed=st.integers(0, 1 << 30),
)
def test_answers_match_their_regex(shared: Engine, pattern: str, seed: int) -> None:
    """Against Python's own ``re``."""
    results = finished(shared, ask("a", regex=pattern, seed=seed, max_tokens=60))
    text = text_of(results.of("a"))
    if results.reasons["a", 0] == "stop":
        assert re.fullmatch(pattern, text)
    assert any(c in pattern for c in "+") or results.reasons["a", 0] == "stop"


def test_choices_and_grammars(shared: Engine) -> None:
    lark = 'start: "<" word ("," word)~0..3 ">"\nword: /[a-z]{2}/'
    gbnf = 'root ::= "<" [a-z] root? ">"'
    results = finished(
        shared,
        *(ask(f"c{i}", [i], choice=["yes", "no", "not sure"], seed=i) for i in range(6)),
        *(ask(f"l{i}", [i], grammar=lark, seed=i) for i in range(6)),
        *(ask(f"g{i}", [i], grammar=gbnf, seed=i, max_tokens=100) for i in range(6)),
        *(ask(f"o{i}", [i], json_object=True, disable_any_whitespace=True, seed=i, max_tokens=200) for i in range(3)),
    )
    for (name, _), tokens in results.tokens.items():
        text = text_of(tokens)
        if results.reasons[name, 0] != "stop":
            assert name[0] in "go"
        elif name[0] == "c":
            assert text in ("yes", "no", "not sure")
        elif name[0] == "l":
            assert re.fullmatch(r"<[a-z]{2}(,[a-z]{2}){0,3}>", text)
        elif name[0] == "g":
            assert re.fullmatch(r"(<[a-z])+>+", text)
            assert text.count("<") == text.count(">")
        else:
            assert isinstance(json.loads(text), dict)
    assert len({text_of(t) for (name, _), t in results.tokens.items() if name[0] == "c"}) > 1


def test_neighbours_and_preemption_change_nothing() -> None:
    """The same answer alone, among others, and with a cache so small that sequences lose their place."""

    def asked(i: int) -> EngineRequest:
        if i % 3 == 2:
            return request(f"r{i}", [i, 5], eos=[EOS], max_tokens=30, temperature=1.0, seed=i)
        penalties = {"presence_penalty": 0.5, "repetition_penalty": 1.2} if i % 2 else {}
        return ask(f"r{i}", [i, 5], json=FOREVER, seed=i, **penalties)

    alone = {i: finished(engine(), asked(i)).of(f"r{i}") for i in range(7)}
    for config in ({}, {"num_blocks": 24, "max_model_len": 96}):
        together = engine(**config)
        items = [asked(i) for i in range(7)]
        if config:
            for item in items:
                item.params.max_tokens = min(item.params.max_tokens or 80, 80)
        results = finished(together, *items)
        assert {i: results.of(f"r{i}") for i in range(7)} == alone
        if config:
            assert together.stats().preemptions > 0


def test_several_answers_each_follow_it(shared: Engine) -> None:
    results = finished(shared, ask("a", json=FOREVER, n=5, seed=3, logprobs=2))
    texts = [text_of(results.of("a", i)) for i in range(5)]
    for text in texts:
        jsonschema.validate(json.loads(text), FOREVER)
    assert len(set(texts)) > 1
    assert all(len(out.logprobs or []) == len(out.token_ids) for out in results.outputs)


def test_the_end_of_the_grammar_ends_the_answer(shared: Engine) -> None:
    """Also where the client wants more tokens, or no end: there is nothing else to say."""
    results = finished(
        shared,
        ask("plain", regex="abc"),
        ask("more", regex="abc", min_tokens=10),
        ask("endless", regex="abc(d)?", ignore_eos=True, logit_bias={EOS: 100.0}),
        ask("cut", regex="abc", max_tokens=2),
    )
    assert {name: text_of(t) for (name, _), t in results.tokens.items()} == {
        "plain": "abc", "more": "abc", "endless": "abc", "cut": "ab",
    }  # fmt: skip
    assert [results.reasons[n, 0] for n in ("plain", "more", "endless", "cut")] == ["stop", "stop", "stop", "length"]


def test_what_comes_before_the_marker_is_free(shared: Engine) -> None:
    mark = TEXT.tokens.index(b"!")
    asked = [ask(f"a{i}", [i], after="!", regex="[a-z]{3}", seed=i, logit_bias={mark: 2.0}) for i in range(6)]
    results = finished(shared, *asked)
    befores = []
    for (name, _), tokens in results.tokens.items():
        before, _, after = text_of(tokens).partition("!")
        befores.append(before)
        if results.reasons[name, 0] == "stop" and tokens[-1] != EOS:
            assert re.fullmatch("[a-z]{3}", after)
    assert any(re.search("[^a-z]", before) for before in befores)


def test_where_nothing_is_left_the_request_fails_alone(shared: Engine) -> None:
    a, b = (TEXT.tokens.index(c) for c in (b"a", b"b"))
    results = finished(shared, ask("bad", regex="a+", allowed_token_ids=[b]), ask("good", regex="a", logit_bias={a: 1}))
    assert results.reasons == {("bad", 0): "error", ("good", 0): "stop"}


def test_log_probabilities_are_the_models_own(shared: Engine) -> None:
    """Those of the logits before the mask, as vLLM's are."""
    free = finished(shared, request("f", [1, 2, 3], max_tokens=1, logprobs=VOCAB))
    held = finished(shared, ask("h", regex="a", logprobs=VOCAB))
    full = dict(zip(free.outputs[0].logprobs[0].token_ids[1:], free.outputs[0].logprobs[0].logprobs[1:], strict=True))  # type: ignore[index]
    chosen = held.of("h")[0]
    assert held.outputs[0].logprobs[0].logprobs[0] == pytest.approx(full[chosen], abs=1e-6)  # type: ignore[index]


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    gate = threading.Event()

    def slowly() -> Vocabulary:
        assert gate.wait(60)
        return TEXT

    busy = engine(slowly)
    busy.add_request(ask("held", regex="abc"))
    busy.add_request(ask("gone", regex="abc"))
    busy.add_request(ask("part", regex="abc", n=3, seed=1))
    busy.add_request(request("free", [1, 2], max_tokens=5))
    results = Results()
    for _ in range(10):
        results.add(busy.step())
    assert results.reasons == {("free", 0): "length"}
    assert busy.has_work()
    busy.abort(["gone"])
    busy.abort(["part"], 0)
    gate.set()
    results.add(out for out in _until_idle(busy))
    assert results.reasons == {("free", 0): "length", ("held", 0): "stop", ("part", 1): "stop", ("part", 2): "stop"}
    assert {text_of(results.of(n, i)) for n, i in results.reasons if n != "free"} == {"abc"}


def test_a_grammar_that_cannot_be_followed_is_the_requests_fault() -> None:
    """One that only shows with the vocabulary: the front end has let it pass."""
    bomb = "start: " + " ".join('("a"|"b"|start)?' for _ in range(600))
    made = engine()
    results = finished(made, ask("bomb", grammar=bomb), ask("good", regex="abc"))
    assert results.reasons == {("bomb", 0): "error", ("good", 0): "stop"}
    failure = next(o for o in results.outputs if o.finish_reason == "error").failure()
    assert isinstance(failure, ParameterError)
    assert failure.field == "structured_outputs"


def test_a_grammar_that_takes_too_long_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library cannot be interrupted: its thread is left behind, twice at most, and what it compiles is refused."""
    gate = threading.Event()
    real = GrammarCompiler._compiled

    def stuck(self: GrammarCompiler, text: str, tools: Any) -> Any:
        if "slow" in text:
            assert gate.wait(60)
        return real(self, text, tools)

    monkeypatch.setattr(GrammarCompiler, "_compiled", stuck)
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.2)
    made = engine()
    try:
        slow = [ask(f"slow{i}", grammar=f'start: "slow{i}"') for i in range(2)]
        results = finished(made, slow[0], ask("good", regex="abc"), slow[1], ask("also good", regex="abd"))
        assert results.reasons == {("slow0", 0): "error", ("good", 0): "stop"} | {
            ("slow1", 0): "error",
            ("also good", 0): "stop",
        }
        again = finished(made, ask("again", grammar='start: "slow0"'))
        assert again.reasons == {("again", 0): "error"}
        for output in [*results.outputs, *again.outputs]:
            if output.finish_reason == "error":
                assert "takes longer than 0.2 s" in str(output.failure())
        monkeypatch.setattr(grammars, "WAIT_SECONDS", 0.5)
        third = finished(made, ask("slow2", grammar='start: "slow2"'), ask("behind", regex="abe"))
        assert third.reasons == {("slow2", 0): "error", ("behind", 0): "error"}
        assert all(isinstance(o.failure(), OverloadedError) for o in third.outputs)
    finally:
        gate.set()
    for _ in range(100):
        if finished(made, ask("after", regex="abf")).reasons == {("after", 0): "stop"}:
            return
    raise AssertionError("the threads that were left did not come back")


def test_an_engine_without_a_vocabulary_says_so() -> None:
    made = make_plain()
    with pytest.raises(ParameterError, match="structured_outputs"):
        made.add_request(ask("a", regex="abc"))
    assert not made.has_work()


def make_plain() -> Engine:
    ops = make_ops()
    return Engine(TinyModel(ops), ops, EngineConfig(num_blocks=8, vocab_size=VOCAB, max_model_len=512))


def _until_idle(made: Engine) -> list[Any]:
    found: list[Any] = []
    for _ in range(2000):
        if not made.has_work():
            return found
        found += made.step()
    raise AssertionError("the engine never falls idle")


WIDE = Vocabulary([*(bytes([i]) for i in range(256)), "汉字".encode()[:4], b"</th", b'ink>\n{"', b""], [], [259])
"""All bytes, a token that ends inside a character, and two that hold parts of a marker and of what follows it."""


def state_of(after: str = "", before: str = "", **fields: Any) -> GrammarState:
    text = GrammarChecker().grammar(StructuredOutputsParams(**fields))
    return GrammarState(GrammarCompiler(lambda: WIDE, 288).submit(text).result(60), after.encode(), before.encode())


def allowed(state: GrammarState) -> set[int]:
    bits = np.unpackbits(allowed_tokens([state], 288)[0], bitorder="little")[:288]
    return set(np.flatnonzero(bits).tolist())


def test_characters_may_be_split_over_tokens() -> None:
    state = state_of(choice=["汉字", "漢"])
    assert allowed(state) == {0xE6, 256}
    assert not state.advance(256)
    assert allowed(state) == {0xAD}
    assert [state.advance(byte) for byte in "汉字".encode()[4:]] == [False, True]


def test_the_grammar_begins_behind_the_marker() -> None:
    for tokens, expected in (
        ([*b"so {</think>"], {ord("{")}),
        ([*b"so", 257, 258], {ord('"'), ord("\\")} | set(range(32, 127))),
        ([*b"x", 257, *b"ink>"], {ord("{")}),
    ):
        state = state_of("</think>", json_object=True, disable_any_whitespace=True)
        for token in tokens:
            assert not state.begun
            assert not state.advance(token)
        assert state.begun
        assert expected <= allowed(state) or expected == allowed(state) - {258}


def test_an_answer_that_does_not_begin_with_the_mark_follows_the_grammar_at_once() -> None:
    spaces = {9, 10, 11, 12, 13, 32}
    state = state_of("</think>", "<think>", choice=["<b>", "yes"])
    assert allowed(state) == {ord("<"), ord("y")} | spaces
    assert [state.advance(token) for token in b"yes"] == [False, False, True]

    state = state_of("</think>", "<think>", choice=["<b>", "yes"])
    assert not state.advance(ord("<"))
    assert allowed(state) == {ord("t"), ord("b")}  # both are still possible
    assert state.behind(b"b>") is None  # complete
    assert state.behind(b"ye") is None
    assert state.behind(b"think>any")
    assert [state.advance(token) for token in b"b>"] == [False, True]

    state = state_of("</think>", "<think>", choice=["<b>", "yes"])
    assert not any(state.advance(token) for token in b"\n<t")
    assert allowed(state) == {ord("h")}  # the grammar takes neither the newline nor the t
    assert not any(state.advance(token) for token in b"hink>hm yes")
    assert not state.bounds
    assert not any(state.advance(token) for token in b"</think>")
    assert allowed(state) == {ord("<"), ord("y")}
    assert state.behind(b"ye")
    assert state.behind(b"t") is None
    assert [state.advance(token) for token in b"<b>"] == [False, False, True]


def test_a_grammar_is_kept_until_it_is_worn_out() -> None:
    """Its automaton grows with all its users, so it must not be everybody's for ever."""
    compiler = GrammarCompiler(lambda: WIDE, 288)
    first = compiler.submit("start: /[a-z]*/").result(60)
    assert compiler.submit("start: /[a-z]*/").result(60) is first
    state = GrammarState(first, b"")
    for _ in range(MAX_USED):
        state.advance(97)
    assert compiler.submit("start: /[a-z]*/").result(60) is not first
    for i in range(MAX_KEPT):
        compiler.submit(f'start: "{i}"').result(60)
    again = compiler.submit("start: /[a-z]*/").result(60)
    broken = GrammarState(again, b"")
    broken.advance(10)
    assert broken.fault is not None
    assert compiler.submit("start: /[a-z]*/").result(60) is not again


def test_a_mask_that_takes_too_much_work_is_found_before_the_request_runs() -> None:
    bomb = "start: " + " ".join('("a"|"b"|start)?' for _ in range(3000))
    with pytest.raises(ParameterError, match="structured_outputs"):
        GrammarCompiler(lambda: WIDE, 288).submit(bomb).result(60)


def test_ids_without_text_and_special_ids_are_never_allowed() -> None:
    state = state_of(regex="(?s:.)*")
    assert allowed(state) & set(range(260, 288)) == set()
    assert 259 in allowed(state)
