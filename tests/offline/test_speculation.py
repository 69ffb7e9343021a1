"""Guessing ahead through ``LLM``: the same text, ends and grammars, with fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from qiao import LLM, SamplingParams, StructuredOutputsParams
from qiao.errors import ParameterError

from tests.offline.conftest import SMALL
from tests.support.checkpoints import rand_checkpoint

LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
LIST = {"type": "array", "items": {"enum": ["aa", "ab"]}, "minItems": 6, "maxItems": 9}
PROMPTS = ["ab", "abcabcabcabc", "12 34 56", "x"]


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def guessing(request: pytest.FixtureRequest, rand: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    config = LOOKUP
    if request.param == "draft_model":
        # The same seed gives its one layer the weights of the large model's first.
        small = rand_checkpoint(tmp_path_factory.mktemp("small"), num_hidden_layers=1)
        config = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 3}
    return LLM(str(rand), speculative_config=config, **SMALL)


def test_answers_are_those_without_guesses(rand_llm: LLM, guessing: LLM) -> None:
    """Stop strings, biases that make the text repeat itself, penalties, several answers, log-probabilities."""
    loop = {98: 30.0, 99: 30.0}
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, logit_bias=loop),
        SamplingParams(temperature=0.0, max_tokens=40, logit_bias=loop, frequency_penalty=1.5),
        SamplingParams(temperature=1.0, seed=5, max_tokens=40, n=3, logit_bias=loop, stop=["bbcb", "ccbc"]),
        SamplingParams(temperature=0.8, seed=7, max_tokens=20, logprobs=1),
    ]

    def answers(llm: LLM) -> list[object]:
        results = llm.generate(PROMPTS, params, use_tqdm=False)
        return [(o.text, o.token_ids, o.finish_reason, o.stop_reason) for r in results for o in r.outputs]

    assert answers(guessing) == answers(rand_llm)
    stats = guessing.get_metrics()
    assert stats.accepted_tokens > 0
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


def test_grammars_are_followed(rand_llm: LLM, guessing: LLM) -> None:
    """Guesses that the grammar refuses are rejected, the others are kept; the end is where it would be."""
    wanted = (
        StructuredOutputsParams(regex="(ab){12}[0-9]"),
        StructuredOutputsParams(json=LIST, disable_any_whitespace=True),
    )
    for structured in wanted:
        params = SamplingParams(structured_outputs=structured, max_tokens=200, seed=3, temperature=1.0)
        before = guessing.get_metrics().accepted_tokens
        (found,), (plain,) = (llm.generate("a", params, use_tqdm=False)[0].outputs for llm in (guessing, rand_llm))
        assert (found.text, found.finish_reason) == (plain.text, plain.finish_reason)
        assert found.finish_reason == "stop"
        assert guessing.get_metrics().accepted_tokens > before


def test_a_draft_model_with_another_vocabulary_is_refused(rand: Path, tmp_path: Path) -> None:
    other = rand_checkpoint(tmp_path, vocab_size=336, num_hidden_layers=1)
    config = {"method": "draft_model", "model": str(other), "num_speculative_tokens": 3}
    with pytest.raises(ParameterError, match="vocabulary of 336, the model one of 320"):
        LLM(str(rand), speculative_config=config, **SMALL)
