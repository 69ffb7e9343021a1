from collections.abc import Callable
from typing import Any

import pytest
from qiao import SamplingParams
from qiao.errors import ModelError, ParameterError, PromptTooLongError
from qiao.frontend import Frontend

Make = Callable[..., Frontend]


def ask(frontend: Frontend, prompt: Any = "ab", **params: Any) -> Any:
    return frontend.request(prompt, SamplingParams(**params), request_id="r")


def test_a_request_is_tokens_and_resolved_limits(make_frontend: Make) -> None:
    request = ask(make_frontend(), "é", max_tokens=5)
    assert request.prompt_token_ids == [0xC3, 0xA9]
    assert (request.params.max_tokens, request.eos_token_ids, request.request_id) == (5, [257], "r")


def test_max_new_tokens_is_only_the_default(make_frontend: Make) -> None:
    frontend = make_frontend({"max_new_tokens": 8, "temperature": 0.5})
    assert ask(frontend, max_tokens=20).params.max_tokens == 20
    assert ask(frontend, max_tokens=None).params.max_tokens == 8
    assert ask(frontend, [97] * 60, max_tokens=None).params.max_tokens == 4
    assert frontend.default_params() == SamplingParams(max_tokens=8, temperature=0.5)
    assert ask(make_frontend(), max_tokens=None).params.max_tokens == 62


@pytest.mark.parametrize(
    "config", [{"temperature": 5.0}, {"top_p": 0}, {"top_k": "x"}, {"repetition_penalty": 0}, {"max_new_tokens": 0}]
)
def test_defaults_that_no_request_may_have_stop_the_start(make_frontend: Make, config: dict[str, Any]) -> None:
    (field,) = config
    with pytest.raises(ModelError, match=f"generation_config.*{field}.*--generation-config vllm"):
        make_frontend(config)
    assert make_frontend(config, generation_config="vllm").sampling_defaults == {}
    assert make_frontend(config, override_generation_config={field: 1}).default_params().n == 1


def test_generation_config_can_be_left_out_or_overridden(make_frontend: Make) -> None:
    config = {"temperature": 0.5, "top_p": 0.9}
    assert make_frontend(config, generation_config="vllm").sampling_defaults == {}
    changed = make_frontend(config, override_generation_config={"top_p": 0.7})
    assert changed.sampling_defaults == {"temperature": 0.5, "top_p": 0.7}


@pytest.mark.parametrize(("length", "wanted", "fits"), [(60, 4, True), (60, 5, False), (63, None, True), (64, 0, True)])
def test_prompt_and_answer_must_fit_together(make_frontend: Make, length: int, wanted: int | None, fits: bool) -> None:
    if fits:
        assert ask(make_frontend(), [97] * length, max_tokens=wanted).params.max_tokens == (
            wanted or (1 if length == 63 else 0)
        )
    else:
        with pytest.raises(PromptTooLongError, match=r"60 tokens.*65.*64 tokens.*at most 4"):
            ask(make_frontend(), [97] * length, max_tokens=wanted)


@pytest.mark.parametrize(("length", "wanted"), [(64, 1), (64, None), (65, 0), (1000, 5)])
def test_a_prompt_that_cannot_fit_is_refused_with_numbers(make_frontend: Make, length: int, wanted: int | None) -> None:
    with pytest.raises(PromptTooLongError, match=rf"{length} tokens.*context length is 64"):
        ask(make_frontend(), [97] * length, max_tokens=wanted)


def test_the_cache_may_be_the_smaller_limit(make_frontend: Make) -> None:
    frontend = make_frontend(num_blocks=2)
    assert ask(frontend, [97] * 30, max_tokens=None).params.max_tokens == 2
    with pytest.raises(PromptTooLongError, match=r"33 tokens.*KV cache holds 32.*64"):
        ask(frontend, [97] * 33)


def test_offline_requests_are_cut_where_online_ones_are_refused(make_frontend: Make) -> None:
    request = make_frontend().request([97] * 60, SamplingParams(max_tokens=99), request_id="r", strict=False)
    assert request.params.max_tokens == 4


def test_best_of_is_not_dropped(make_frontend: Make) -> None:
    assert ask(make_frontend(), "a", n=2, best_of=2).params.n == 2
    with pytest.raises(ParameterError, match="best_of: must equal n"):
        ask(make_frontend(), "a", n=1, best_of=2)


def test_a_huge_text_is_refused_without_tokenizing_it(make_frontend: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = make_frontend()
    monkeypatch.setattr(frontend, "encode", lambda *a, **k: pytest.fail("tokenized"))
    with pytest.raises(PromptTooLongError, match="1000000 characters, at least"):
        ask(frontend, "a" * 1_000_000)


@pytest.mark.parametrize(
    ("keep", "expected"), [(1, [100]), (3, [98, 99, 100]), (10, [97, 98, 99, 100]), (-1, [97, 98, 99, 100])]
)
def test_truncation_keeps_the_end(make_frontend: Make, keep: int, expected: list[int]) -> None:
    assert ask(make_frontend(), "abcd", truncate_prompt_tokens=keep).prompt_token_ids == expected


def test_truncation_to_what_fits_leaves_room_for_the_answer(make_frontend: Make) -> None:
    request = ask(make_frontend(), "a" * 500, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(request.prompt_token_ids) == 54
    with pytest.raises(ParameterError, match="truncate_prompt_tokens"):
        ask(make_frontend(), "a", truncate_prompt_tokens=65)


@pytest.mark.parametrize("prompt", [[320], [-1], [1.5], [True], ["a"], [97, None]])
def test_ids_outside_the_vocabulary(make_frontend: Make, prompt: Any) -> None:
    with pytest.raises(ParameterError, match="vocabulary of 320") as caught:
        ask(make_frontend(), prompt)
    assert caught.value.field == "prompt"


def test_ids_without_text_are_harmless(make_frontend: Make) -> None:
    assert ask(make_frontend(), [301, 120]).prompt_token_ids == [301, 120]


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(make_frontend: Make, prompt: Any) -> None:
    with pytest.raises(ParameterError, match="empty"):
        ask(make_frontend(), prompt)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": [151645]}, "stop_token_ids"),
        ({"stop_token_ids": [-3]}, "stop_token_ids"),
        ({"logit_bias": {320: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stop": ["a\ud800b"]}, "stop"),
        ({"bad_words": ["a\udfff"]}, "bad_words"),
        ({"n": 9}, "n"),
    ],
)
def test_parameters_are_checked_before_the_engine(make_frontend: Make, params: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        ask(make_frontend(), **params)
    assert caught.value.field == field


def test_unpaired_surrogates_are_named_and_pairs_are_fine(make_frontend: Make) -> None:
    frontend = make_frontend()
    with pytest.raises(ParameterError, match=r"prompt.*U\+D800.*character 1"):
        ask(frontend, "a\ud800b")
    with pytest.raises(ParameterError, match="messages"):
        frontend.chat_prompt([{"role": "user", "content": "a\ud800b"}])
    with pytest.raises(ParameterError, match="prompt"):
        frontend.encode("\udc00")
    assert ask(frontend, "\U0001f600").prompt_token_ids == [0xF0, 0x9F, 0x98, 0x80]


def test_priority_and_salt(make_frontend: Make) -> None:
    params = SamplingParams()
    with pytest.raises(ParameterError, match="priority"):
        make_frontend().request("a", params, request_id="r", priority=3)
    ordered = make_frontend(scheduling_policy="priority")
    assert ordered.request("a", params, request_id="r", priority=3, cache_salt="t").priority == 3
    with pytest.raises(ParameterError, match="cache_salt"):
        ordered.request("a", params, request_id="r", cache_salt="x" * 1025)


def test_bad_words_become_ids(make_frontend: Make, spm: Any) -> None:
    frontend = make_frontend()
    assert ask(frontend, bad_words=["hi"]).params.bad_words_token_ids == [[104, 105]]
    assert ask(frontend, bad_words=[" hi"]).params.bad_words_token_ids == [[104, 105]]
    other = Frontend(spm, frontend.info.__class__(**{**_fields(frontend), "vocab_size": 400}), frontend.args)
    plain = spm("the", add_special_tokens=False)["input_ids"]
    assert ask(other, bad_words=["the"]).params.bad_words_token_ids == [plain]


def _fields(frontend: Frontend) -> dict[str, Any]:
    return {name: getattr(frontend.info, name) for name in frontend.info.__struct_fields__}


def test_the_callers_parameters_are_not_changed(make_frontend: Make) -> None:
    params = SamplingParams(max_tokens=None, bad_words=["a"])
    make_frontend().request("x", params, request_id="r")
    assert (params.max_tokens, params.bad_words_token_ids) == (None, None)


def test_chat_prompts_have_no_second_bos(make_frontend: Make) -> None:
    frontend = make_frontend()
    text = frontend.chat_prompt([{"role": "user", "content": "x"}])
    request = frontend.request(text, SamplingParams(), request_id="r", add_special_tokens=False)
    assert request.prompt_token_ids[0] == 258
    assert request.prompt_token_ids.count(256) == 0


def test_decoding(make_frontend: Make) -> None:
    frontend = make_frontend()
    assert frontend.decode([104, 257, 300, 310]) == "h</s>hello"
    assert frontend.token_bytes(0xE2) == b"\xe2"
    with pytest.raises(ParameterError, match="tokens"):
        frontend.decode([320])
