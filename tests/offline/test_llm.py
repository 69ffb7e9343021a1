from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from qiao import LLM, RequestOutputKind, SamplingParams, TokensPrompt
from qiao.errors import KernelError, ParameterError, PromptTooLongError, UsageError
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.checkpoints import chain_checkpoint, rand_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["ab", "a much longer prompt than the other", "é", "12 34 56"]


def idle(llm: LLM) -> None:
    """Nothing is left in the engine after a call, whatever happened in it."""
    stats = llm.get_metrics()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


def greedy_reference(folder: Path, ids: list[int], count: int) -> list[int]:
    """transformers' own greedy tokens, to the end token at most."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return [int(i) for i in out[0, len(ids) :]]


def test_greedy_tokens_and_text_are_transformers(rand: Path, rand_llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(rand)
    results = rand_llm.generate(PROMPTS, GREEDY)
    assert [r.prompt for r in results] == PROMPTS
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        expected = greedy_reference(rand, ids, 12)
        assert result.prompt_token_ids == ids
        assert result.outputs[0].token_ids == expected
        whole = tokenizer.decode(ids + [i for i in expected if i != 257], skip_special_tokens=True)
        assert prompt + result.outputs[0].text == whole
        assert result.finished
        assert result.outputs[0].finish_reason == ("stop" if 257 in expected else "length")
    idle(rand_llm)


def test_every_form_of_a_prompt(chain_llm: LLM) -> None:
    tokens: TokensPrompt = {"prompt_token_ids": [120]}
    for prompts, count in (
        ("x", 1),
        (["x", "x"], 2),
        ([120], 1),
        ([[120], [97, 120]], 2),
        ({"prompt": "x"}, 1),
        (tokens, 1),
        (["x", [120], {"prompt": "x"}, {"prompt_token_ids": [120], "prompt": "x"}], 4),
    ):
        results = chain_llm.generate(prompts, GREEDY)
        assert [r.outputs[0].text for r in results] == ["DEFGHIJk"] * count
    assert [r.outputs[0].text for r in chain_llm.generate(prompt_token_ids=[[120]], sampling_params=GREEDY)] == [
        "DEFGHIJk"
    ]


@pytest.mark.parametrize(
    "prompts", [None, 7, [7.5], [{}], [{"prompt": 5}], [None], {"prompt": "x", "multi_modal_data": {"i": 1}}]
)
def test_what_is_no_prompt(chain_llm: LLM, prompts: Any) -> None:
    with pytest.raises((ParameterError, TypeError)):
        chain_llm.generate(prompts, GREEDY)
    idle(chain_llm)


def test_token_ids_of_numpy_and_torch_are_integers(chain_llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    for prompts in (
        np.array([5, 6]),
        torch.tensor([5, 6]),
        np.array([[5, 6]]),
        [np.int64(5), 6],
        {"prompt_token_ids": np.array([5, 6])},
        [torch.tensor([5, 6])],
    ):
        (result,) = chain_llm.generate(prompts, params)
        assert result.prompt_token_ids == [5, 6] and all(type(i) is int for i in result.prompt_token_ids)
    results = chain_llm.generate([torch.tensor([5]), np.array([6])], params)
    assert [result.prompt_token_ids for result in results] == [[5], [6]]


@pytest.mark.parametrize(
    ("prompts", "options", "field"),
    [
        ("x", {"sampling_params": {"max_tokens": 1}}, "sampling_params"),
        ("x", {"sampling_params": [{"max_tokens": 1}]}, "sampling_params"),
        ("x", {"sampling_params": 5}, "sampling_params"),
        (["x", "y"], {"priority": "12"}, "priority"),
        ({"prompt": "x", "cache_salt": 5}, {}, "cache_salt"),
        ({"prompt_token_ids": "56"}, {}, "prompts"),
        ([[5.0, 6.0]], {}, "prompts"),
        (5.5, {}, "prompts"),
    ],
)
def test_wrong_types_name_their_field(chain_llm: LLM, prompts: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError, match=f"^{field}: "):
        chain_llm.generate(prompts, **options)


def test_one_or_many_parameters(chain_llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 3)]
    assert [r.outputs[0].text for r in chain_llm.generate(["x", "x"], params)] == ["D", "DEF"]
    with pytest.raises(ParameterError, match="2 were given for 3"):
        chain_llm.generate(["x"] * 3, params)


def test_every_prompt_is_checked_before_the_first_runs(chain_llm: LLM) -> None:
    before = chain_llm.get_metrics().generation_tokens
    with pytest.raises(PromptTooLongError):
        chain_llm.generate(["x", [97] * 5000], GREEDY)
    assert chain_llm.get_metrics().generation_tokens == before
    idle(chain_llm)


def test_stop_string_over_tokens(chain_llm: LLM) -> None:
    (result,) = chain_llm.generate("x", SamplingParams(temperature=0, max_tokens=20, stop="DEFGHIJ"))
    answer = result.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("", "stop", "DEFGHIJ")
    (near,) = chain_llm.generate("x", SamplingParams(temperature=0, max_tokens=20, stop=["DEFZ"]))
    assert (near.outputs[0].text, near.outputs[0].finish_reason) == ("DEFGHIJk", "stop")
    (cut,) = chain_llm.generate("x", SamplingParams(temperature=0, max_tokens=3, stop=["DEFZ"]))
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == ("DEF", "length")
    idle(chain_llm)


def test_streaming_deltas_join_to_the_whole_and_nothing_of_a_stop_string_shows(chain_llm: LLM) -> None:
    def deltas(**params: Any) -> list[str]:
        wanted = SamplingParams(temperature=0, max_tokens=20, output_kind=RequestOutputKind.DELTA, **params)
        return [c.text for result in chain_llm.stream("x", wanted) for c in result.outputs]

    assert deltas() == [*"DEFGHIJk", ""]
    assert "".join(deltas(stop=["DEFGHIJ"])) == ""
    assert deltas(stop=["DEFZ"])[:4] == ["", "", "", "DEFG"]
    assert "".join(deltas(n=2)) == "DDEEFFGGHHIIJJkk"
    idle(chain_llm)


def test_streaming_cumulative_and_final_only(chain_llm: LLM) -> None:
    texts = [r.outputs[0].text for r in chain_llm.stream("x", GREEDY)]
    assert texts == ["D", "DE", "DEF", "DEFG", "DEFGH", "DEFGHI", "DEFGHIJ", "DEFGHIJk", "DEFGHIJk"]
    final = list(chain_llm.stream("x", GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY)))
    assert [r.outputs[0].text for r in final] == ["DEFGHIJk"]


def test_leaving_a_stream_aborts_it(chain_llm: LLM) -> None:
    stream = chain_llm.stream("x", GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    idle(chain_llm)


def test_streams_read_in_turns_and_a_call_in_between(rand_llm: LLM) -> None:
    """Whoever steps the engine, each request's outputs reach the one who reads it."""
    prompts, lengths = ("ab", "cde", "f"), (5, 9, 2)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    alone = [rand_llm.generate(p, s)[0].outputs[0].token_ids for p, s in zip(prompts, params, strict=True)]
    streams = [rand_llm.stream(p, s) for p, s in zip(prompts[:2], params[:2], strict=True)]
    last: dict[int, list[int]] = {}
    while streams_left := [i for i, s in enumerate(streams) if s is not None]:
        for i in streams_left:
            result = next(streams[i], None)
            if result is None:
                streams[i] = None
                continue
            last[i] = result.outputs[0].token_ids
            assert rand_llm.generate(prompts[2], params[2])[0].outputs[0].token_ids == alone[2]
    assert last == {0: alone[0], 1: alone[1]}
    idle(rand_llm)


def test_chat(chain_llm: LLM) -> None:
    messages = [{"role": "user", "content": "x"}]
    (result,) = chain_llm.chat(messages, GREEDY)
    assert result.outputs[0].text == "DEFGHIJk"
    assert result.prompt_token_ids[0] == 258
    results = chain_llm.chat([messages, [{"role": "system", "content": "s"}, *messages]], GREEDY)
    assert [r.outputs[0].text for r in results] == ["DEFGHIJk"] * 2
    continued = chain_llm.chat(
        [*messages, {"role": "assistant", "content": "DE"}],
        GREEDY,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert continued[0].outputs[0].text == "FGHIJk"
    assert (
        "".join(
            r.outputs[0].text
            for r in chain_llm.stream_chat(messages, GREEDY.clone(output_kind=RequestOutputKind.DELTA))
        )
        == "DEFGHIJk"
    )
    for wrong in ("x", [], [[]], [{"content": "x"}]):
        with pytest.raises(ParameterError, match="messages"):
            chain_llm.chat(wrong, GREEDY)  # type: ignore[arg-type]


def test_several_answers_and_logprobs(rand_llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=6, logprobs=2, ignore_eos=True)
    (result,) = rand_llm.generate("ab", params)
    assert [a.index for a in result.outputs] == [0, 1, 2]
    assert len({tuple(a.token_ids) for a in result.outputs}) > 1
    for answer in result.outputs:
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids) == 6
        chosen = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
        assert answer.cumulative_logprob == pytest.approx(sum(chosen))
        assert all(2 <= len(entry) <= 3 for entry in answer.logprobs)
    (again,) = rand_llm.generate("ab", params)
    assert [a.token_ids for a in again.outputs] == [a.token_ids for a in result.outputs]


def test_prompt_logprobs_against_the_model(rand: Path, rand_llm: LLM) -> None:
    (result,) = rand_llm.generate("abcd", SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(rand)(torch.tensor([result.prompt_token_ids])).logits[0]
    expected = torch.log_softmax(logits.float(), -1)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    for i, entry in enumerate(result.prompt_logprobs[1:]):
        assert entry is not None
        token = result.prompt_token_ids[i + 1]
        assert entry[token].logprob == pytest.approx(float(expected[i, token]), abs=1e-3)
        assert entry[token].decoded_token == chr(token)


def test_zero_new_tokens_only_score(rand_llm: LLM) -> None:
    (result,) = rand_llm.generate("abc", SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert (result.outputs[0].text, result.outputs[0].token_ids, result.finished) == ("", [], True)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == 3


def test_more_prompts_than_the_queue_and_the_batch_hold(tmp_path: Path) -> None:
    folder = chain_checkpoint(tmp_path / "m", "x>ab>c")
    llm = LLM(str(folder), device="cpu", num_gpu_blocks_override=20, max_num_seqs=2, max_num_queued_reqs=3)
    results = llm.generate(["x"] * 11, GREEDY)
    assert [r.outputs[0].text for r in results] == ["abc"] * 11
    assert [int(r.request_id) for r in results] == list(range(11))
    idle(llm)


def test_a_second_end_token_is_honoured(tmp_path: Path) -> None:
    for i, (generation, config) in enumerate((([257, 259], 257), (None, [257, 259]), (259, 257))):
        folder = chain_checkpoint(
            tmp_path / str(i),
            "x>ok>id 259>mat",
            generation_config={"eos_token_id": generation} if generation else None,
            eos_token_id=config,
        )
        llm = LLM(str(folder), device="cpu", num_gpu_blocks_override=20, max_num_seqs=2)
        (result,) = llm.chat([{"role": "user", "content": "x"}], SamplingParams(temperature=0, max_tokens=16))
        assert (result.outputs[0].text, result.outputs[0].finish_reason) == ("ok", "stop")


def test_generation_config_gives_the_defaults_and_never_a_cap(tmp_path: Path) -> None:
    folder = rand_checkpoint(tmp_path / "m", generation_config={"max_new_tokens": 8, "temperature": 0.5})
    llm = LLM(str(folder), device="cpu", num_gpu_blocks_override=20, max_num_seqs=2)
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=8, temperature=0.5)
    explicit = SamplingParams(max_tokens=20, ignore_eos=True)
    assert len(llm.generate("ab", explicit)[0].outputs[0].token_ids) == 20
    open_ended = SamplingParams(max_tokens=None, ignore_eos=True)
    assert len(llm.generate("ab", open_ended)[0].outputs[0].token_ids) == 8


def test_vocabulary_larger_than_the_tokenizers(tmp_path: Path) -> None:
    llm = LLM(
        str(chain_checkpoint(tmp_path / "m", "x>id 300>y")), device="cpu", num_gpu_blocks_override=20, max_num_seqs=2
    )
    (result,) = llm.generate("x", SamplingParams(temperature=0, max_tokens=4, stop=["zz"], logprobs=5))
    assert result.outputs[0].text == "y"
    assert result.outputs[0].logprobs is not None
    assert result.outputs[0].logprobs[0][300].decoded_token == "token_id:300"
    assert llm.generate([300, 120], SamplingParams(max_tokens=2))[0].finished


def test_a_kernel_that_raises_fails_the_call_and_leaves_the_engine_clean(
    rand: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(rand), device="cpu", num_gpu_blocks_override=20, max_num_seqs=2)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("boom in a kernel")

    monkeypatch.setattr(llm._engine._runner.model, "logits", broken)
    with pytest.raises(KernelError, match="boom in a kernel"):
        llm.generate(["ab", "cd"], GREEDY)
    monkeypatch.undo()
    idle(llm)
    assert llm.generate("ab", GREEDY)[0].finished


@pytest.mark.parametrize("name", ["encode", "classify", "reward", "sleep", "wake_up", "apply_model"])
def test_what_is_not_there_yet_says_so(rand_llm: LLM, name: str) -> None:
    with pytest.raises(UsageError, match=f"LLM.{name} is not there: "):
        getattr(rand_llm, name)("x")


def test_small_things(rand_llm: LLM) -> None:
    assert rand_llm.get_tokenizer().eos_token_id == 257
    assert rand_llm.reset_prefix_cache() is True
    with pytest.raises(ParameterError, match="lora_request"):
        rand_llm.generate("x", GREEDY, lora_request=object())  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="priority"):
        rand_llm.generate("x", GREEDY, priority=1)
