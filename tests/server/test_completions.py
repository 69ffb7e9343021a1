"""/v1/completions over the real engine, checked with transformers where numbers are concerned."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.server import RunningServer


def ask(rand: RunningServer, **body: Any) -> dict[str, Any]:
    answer = rand.http().post("/v1/completions", json={"model": "M", "prompt": "ab", "max_tokens": 3, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="session")
def reference(rand_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(rand_folder, dtype=torch.float32)


def test_scoring_a_prompt_without_new_tokens(rand: RunningServer, reference: Any) -> None:
    """B001: echo, logprobs and no new token."""
    got = ask(rand, prompt="Answer: Yes", echo=True, logprobs=1, max_tokens=0)
    choice = got["choices"][0]
    ids = list(b"Answer: Yes")
    assert choice["text"] == "Answer: Yes"
    assert got["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == list("Answer: Yes")
    assert choice["logprobs"]["text_offset"] == list(range(len(ids)))
    assert choice["logprobs"]["token_logprobs"][0] is None
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits.log_softmax(-1)[0]
    for place in range(1, len(ids)):
        assert choice["logprobs"]["token_logprobs"][place] == pytest.approx(
            float(expected[place - 1, ids[place]]), abs=1e-3
        )
        tops = choice["logprobs"]["top_logprobs"][place]
        assert max(tops.values()) == pytest.approx(float(expected[place - 1].max()), abs=1e-3)
        assert choice["logprobs"]["tokens"][place] in tops
    assert ask(rand, prompt="ping", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_greedy_tokens_equal_transformers(rand: RunningServer, reference: Any) -> None:
    got = ask(rand, prompt="The quick", max_tokens=12, temperature=0, ignore_eos=True, return_token_ids=True)
    ids = torch.tensor([list(b"The quick")])
    expected = reference.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=-1)
    assert got["choices"][0]["token_ids"] == expected[0, ids.shape[1] :].tolist()
    assert got["choices"][0]["prompt_token_ids"] == ids[0].tolist()


OPTIONAL = (
    *(
        "max_tokens",
        "n",
        "stop",
        "seed",
        "logprobs",
        "suffix",
        "stream",
        "stream_options",
        "logit_bias",
        "user",
        "top_p",
    ),
    *("temperature", "best_of", "echo", "presence_penalty", "frequency_penalty", "top_k", "min_p", "response_format"),
    *("stop_token_ids", "priority", "cache_salt", "request_id", "allowed_token_ids", "guided_json", "model"),
)


def test_integers_with_a_point_are_integers(rand: RunningServer) -> None:
    """As in JSON schemas; some languages have one kind of number only."""
    plain = ask(rand, seed=5, n=2, max_tokens=4, top_k=3, temperature=1)
    assert ask(rand, seed=5.0, n=2.0, max_tokens=4.0, top_k=3.0, temperature=1.0)["choices"] == plain["choices"]
    for wrong in ({"max_tokens": 4.5}, {"max_tokens": 1e300}, {"echo": 1.0}, {"user": 1.0}):
        answer = rand.http().post("/v1/completions", json={"model": "M", "prompt": "ab", **wrong})
        assert (answer.status_code, answer.json()["param"]) == (400, *wrong)


def test_a_limit_that_nobody_asked_for_gives_way(rand: RunningServer) -> None:
    got = ask(rand, prompt="a" * 509, max_tokens=None, ignore_eos=True)
    assert (got["usage"]["completion_tokens"], got["choices"][0]["finish_reason"]) == (3, "length")
    body = {"model": "M", "prompt": "a" * 509, "max_tokens": 16}
    assert rand.http().post("/v1/completions", json=body).status_code == 400


@pytest.mark.parametrize("field", OPTIONAL)
def test_null_is_the_same_as_absent(rand: RunningServer, field: str) -> None:
    """B003."""
    body = {"prompt": "test", "temperature": 0}
    plain = ask(rand, **body)
    nulled = ask(rand, **body, **{field: None}) if field not in body else ask(rand, prompt="test", temperature=None)
    assert len(nulled["choices"]) == 1
    if field not in ("temperature", "max_tokens"):
        assert nulled["choices"] == plain["choices"]
    if field == "max_tokens":
        assert nulled["usage"]["completion_tokens"] <= 16


def test_n_best_of_and_logprobs_are_honoured(rand: RunningServer) -> None:
    """B007 and B009."""
    two = ask(rand, n=2, temperature=1.0, ignore_eos=True)
    assert [c["index"] for c in two["choices"]] == [0, 1]
    assert two["usage"]["completion_tokens"] == 6
    best = ask(rand, n=1, best_of=3, temperature=1.0, seed=1, ignore_eos=True)
    every = ask(rand, n=3, temperature=1.0, seed=1, ignore_eos=True, logprobs=0)
    totals = [sum(c["logprobs"]["token_logprobs"]) for c in every["choices"]]
    assert [c["text"] for c in best["choices"]] == [every["choices"][totals.index(max(totals))]["text"]]
    assert best["choices"][0]["logprobs"] is None
    five = ask(rand, logprobs=5, temperature=0, ignore_eos=True)["choices"][0]["logprobs"]
    assert [len(t) for t in five["top_logprobs"]] == [5, 5, 5]
    zero = ask(rand, logprobs=0, temperature=0, ignore_eos=True)["choices"][0]["logprobs"]
    assert zero["token_logprobs"] == pytest.approx(five["token_logprobs"])
    assert [len(t) for t in zero["top_logprobs"]] == [1, 1, 1]
    assert all(isinstance(token, str) for token in zero["tokens"])


def test_an_answer_that_a_stop_string_ends_does_not_run_on_beside_its_sibling(rand: RunningServer) -> None:
    """The engine's work, the usage and the metrics agree with what the client got."""
    body = {"prompt": "q", "n": 2, "seed": 5, "max_tokens": 450, "ignore_eos": True, "temperature": 1}
    call = functools.partial(rand.http().post, "/v1/completions")
    first, second = [choice["text"] for choice in call(json=body).json()["choices"]]
    rand.wait_for(lambda: rand.metric("vllm:num_requests_running") == 0)
    stop = next(c for c in first[:100] if c.isascii() and c not in second)
    names = ("vllm:generation_tokens_total", "vllm:request_generation_tokens_sum")
    before = [rand.metric(name) for name in names]
    answer = call(json={**body, "stop": stop, "return_token_ids": True}).json()
    rand.wait_for(lambda: rand.metric("vllm:num_requests_running") == 0)
    made, counted = [rand.metric(name) - old for name, old in zip(names, before, strict=True)]
    lengths = [len(choice["token_ids"]) for choice in answer["choices"]]
    assert [choice["text"] for choice in answer["choices"]] == [first[: first.index(stop)], second]
    assert answer["usage"]["completion_tokens"] == sum(lengths) == counted
    assert lengths[0] <= 200
    assert lengths[1] == 450
    assert made < 850  # 900 without the abort


@pytest.mark.parametrize("prompt", ["abcdefgh", list(b"abcdefgh")])
def test_a_truncated_prompt_is_echoed_as_the_model_saw_it(rand: RunningServer, prompt: Any) -> None:
    choice = ask(rand, prompt=prompt, truncate_prompt_tokens=3, echo=True, logprobs=0, max_tokens=1)["choices"][0]
    assert choice["text"].startswith("fgh")
    assert choice["logprobs"]["tokens"][:3] == list("fgh")
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_several_prompts_in_every_form(rand: RunningServer) -> None:
    texts = ask(rand, prompt=["ab", "cd"], n=2, temperature=0, ignore_eos=True)
    ids = ask(rand, prompt=[[97, 98], [99, 100]], n=2, temperature=0, ignore_eos=True)
    assert [c["index"] for c in texts["choices"]] == [0, 1, 2, 3]
    assert texts["choices"] == ids["choices"]
    assert texts["usage"]["prompt_tokens"] == 4
    assert texts["usage"]["completion_tokens"] == 12
    alone = ask(rand, prompt=[99, 100], temperature=0, ignore_eos=True)
    assert alone["choices"][0]["text"] == texts["choices"][2]["text"]


def test_streams_join_to_the_plain_answer(rand: RunningServer) -> None:
    client = rand.openai()
    asked: dict[str, Any] = {"model": "M", "prompt": ["ab", "xyz"], "n": 2, "max_tokens": 9, "seed": 3, "logprobs": 2}
    plain = client.completions.create(**asked, echo=True)
    texts, tokens, reasons = {}, {}, {}
    usage = None
    stream = client.completions.create(**asked, echo=True, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens if choice.logprobs else [])
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    for choice in plain.choices:
        assert texts[choice.index] == choice.text
        assert choice.logprobs is not None
        assert tokens[choice.index] == choice.logprobs.tokens
        assert reasons[choice.index] == choice.finish_reason
    assert usage is not None
    assert plain.usage is not None
    assert usage.completion_tokens == plain.usage.completion_tokens
    assert usage.prompt_tokens == plain.usage.prompt_tokens == 5


def test_token_ids_instead_of_texts_and_prompt_logprobs(rand: RunningServer) -> None:
    got = ask(rand, logprobs=1, return_tokens_as_token_ids=True, prompt_logprobs=1, temperature=0)
    choice = got["choices"][0]
    assert all(token.startswith("token_id:") for token in choice["logprobs"]["tokens"])
    assert choice["prompt_logprobs"][0] is None
    assert "98" in choice["prompt_logprobs"][1]
    assert set(choice["prompt_logprobs"][1]["98"]) == {"logprob", "rank", "decoded_token"}


def test_served_names_and_model_routes(rand: RunningServer) -> None:
    """B011, and names with slashes."""
    client = rand.openai()
    assert [m.id for m in client.models.list()] == ["M", "org/M"]
    assert client.models.retrieve("org/M").id == "org/M"
    assert client.completions.create(model="org/M", prompt="a", max_tokens=1).model == "org/M"
    for call in (
        lambda: client.models.retrieve("no-such-model"),
        lambda: client.completions.create(model="no-such-model", prompt="hi"),
        lambda: client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            call()
        assert error.value.code == "model_not_found"
        assert error.value.param == "model"


def test_request_ids(rand: RunningServer) -> None:
    http = rand.http()
    body = {"model": "M", "prompt": "a", "max_tokens": 1}
    answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["X-Request-Id"] == "abc-1"
    assert answer.json()["id"] == "cmpl-abc-1"
    assert http.post("/v1/completions", json={**body, "request_id": "mine"}).json()["id"] == "cmpl-mine"
    strange = http.post("/v1/completions", json=body, headers={"X-Request-Id": "a b"})
    assert "X-Request-Id" not in strange.headers


def test_prefix_cache_and_prompt_logprobs_agree(rand: RunningServer) -> None:
    """B036 and B038."""
    prompt = [5, 9, 7, 3] * 10
    answers = [ask(rand, prompt=prompt, echo=True, logprobs=1, temperature=0)["choices"] for _ in range(3)]
    first = answers[0][0]["logprobs"]
    assert len(first["tokens"]) == 43
    for other in answers[1:]:
        assert other[0]["logprobs"]["tokens"] == first["tokens"]
        assert other[0]["logprobs"]["token_logprobs"][1:] == pytest.approx(first["token_logprobs"][1:], abs=1e-4)
    longer = [5] * 32 + [8] * 29
    cold = ask(rand, prompt=longer, temperature=0, max_tokens=4, cache_salt="cold")
    ask(rand, prompt=[5] * 32 + [7], max_tokens=1)
    warm = ask(rand, prompt=longer, temperature=0, max_tokens=4)
    assert warm["choices"] == cold["choices"]
    assert warm["usage"]["prompt_tokens"] == 61
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def test_tokenize_and_back(rand: RunningServer) -> None:
    http = rand.http()
    got = http.post("/tokenize", json={"model": "M", "prompt": "añ", "return_token_strs": True}).json()
    assert got["tokens"] == list("añ".encode())
    assert (got["count"], got["max_model_len"], len(got["token_strs"])) == (3, 512, 3)
    assert http.post("/detokenize", json={"model": "M", "tokens": got["tokens"]}).json() == {"prompt": "añ"}
    messages = [{"role": "user", "content": "hi"}]
    chat = http.post("/tokenize", json={"messages": messages}).json()
    assert chat["tokens"][0] == 258  # <|im_start|>
    assert "token_strs" not in chat
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == chat["count"]
