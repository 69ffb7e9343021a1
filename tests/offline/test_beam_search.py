"""Beam search against transformers' own, and its ends against a model whose text is certain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from qiao import LLM
from qiao.errors import ParameterError, PromptTooLongError
from qiao.llm.beam_search import search
from qiao.outputs import CompletionOutput, Logprob, RequestOutput
from qiao.sampling_params import BeamSearchParams, SamplingParams
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = ["ab", "a longer prompt than the other"]


@pytest.mark.parametrize(("width", "count"), [(1, 6), (3, 5), (4, 7)])
def test_beams_are_those_of_transformers(rand: Path, rand_llm: LLM, width: int, count: int) -> None:
    """Without end tokens and length penalty the beams are the likeliest at each length."""
    tokenizer, model = AutoTokenizer.from_pretrained(rand), AutoModelForCausalLM.from_pretrained(rand)
    params = BeamSearchParams(beam_width=width, max_tokens=count, ignore_eos=True, length_penalty=0.0)
    for prompt, found in zip(PROMPTS, rand_llm.beam_search(PROMPTS, params), strict=True):
        ids = tokenizer(prompt)["input_ids"]
        model.generation_config.eos_token_id = None
        with torch.no_grad():
            out = model.generate(
                torch.tensor([ids]),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=count,
                do_sample=False,
                length_penalty=0.0,
                pad_token_id=0,
            )
            scores = [
                model(row[None])
                .logits[0]
                .double()
                .log_softmax(-1)[len(ids) - 1 : -1]
                .gather(1, row[len(ids) :, None])
                .sum()
                for row in out
            ]
        assert [beam.tokens for beam in found.sequences] == out.tolist()
        for beam, score in zip(found.sequences, scores, strict=True):
            assert beam.cum_logprob == pytest.approx(float(score), abs=1e-3)
            assert len(beam.logprobs) == count and beam.finish_reason == "length"
            assert beam.text == tokenizer.decode(beam.tokens, skip_special_tokens=True)


def test_a_beam_that_ends_is_kept_and_not_continued(chain_llm: LLM) -> None:
    """After ``x`` comes ``DEFGHIJk`` and the end, each nearly certain; one model token is one character."""
    params = BeamSearchParams(beam_width=2, max_tokens=20)
    (found,) = chain_llm.beam_search("x", params)
    best = found.sequences[0]
    assert best.text == "xDEFGHIJk" and best.finish_reason == "stop"
    assert best.stop_reason == best.tokens[-1] and len(best.tokens) == 10 == len(best.logprobs) + 1
    (found,) = chain_llm.beam_search("x", BeamSearchParams(beam_width=2, max_tokens=3))
    assert found.sequences[0].text == "xDEF" and found.sequences[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("penalty", "wanted"),
    [(0.0, [[9, 2], [9, 1, 2]]), (1.0, [[9, 1, 1, 1], [9, 1, 1, 2]]), (2.0, [[9, 1, 1, 1], [9, 1, 1, 2]])],
)
def test_the_score_is_the_probability_by_length_and_penalty(penalty: float, wanted: list[list[int]]) -> None:
    """Token 1 with -0.5 each time, or the end, 2, with -1: an end does not count as length, the prompt does."""

    def step(prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        assert (params.logprobs, params.max_tokens) == (4, 1)
        found = [{1: Logprob(-0.5), 2: Logprob(-1.0)}]
        return [RequestOutput("", None, p, [CompletionOutput(0, "", [1], logprobs=found)]) for p in prompts]

    params = BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=penalty)
    (beams,) = search(step, [[9]], params, {2})
    assert [beam.tokens for beam in beams] == wanted
    for beam in beams:
        assert beam.cum_logprob == sum({1: -0.5, 2: -1.0}[token] for token in beam.tokens[1:])


def test_mistakes_are_named(chain_llm: LLM) -> None:
    with pytest.raises(ParameterError, match=r"beam_width.*max_logprobs=22"):
        chain_llm.beam_search("x", BeamSearchParams(beam_width=11, max_tokens=2))
    with pytest.raises(PromptTooLongError, match="do not fit"):
        chain_llm.beam_search("x", BeamSearchParams(beam_width=1, max_tokens=10**6))
    for wrong in ({"beam_width": 0}, {"max_tokens": 1.5}, {"length_penalty": float("nan")}):
        with pytest.raises(ParameterError, match=next(iter(wrong))):
            BeamSearchParams(**{"beam_width": 1, "max_tokens": 1, **wrong})
