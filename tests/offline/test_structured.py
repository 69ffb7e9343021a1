"""Structured outputs of ``LLM``, as vLLM's users write them."""

from __future__ import annotations

import json

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict
from qiao import LLM, SamplingParams, StructuredOutputsParams
from qiao.errors import ParameterError
from qiao.sampling_params import GuidedDecodingParams


class Flags(BaseModel):
    model_config = ConfigDict(extra="forbid")
    left: bool
    right: bool | None


def test_each_prompt_follows_its_own(rand_llm: LLM) -> None:
    wanted = (
        StructuredOutputsParams(json=Flags.model_json_schema()),
        StructuredOutputsParams(json=Flags, disable_any_whitespace=True),
        StructuredOutputsParams(regex="[0-9]{2}"),
        StructuredOutputsParams(choice=["yes", "no"]),
    )
    params = [SamplingParams(structured_outputs=one, max_tokens=200, seed=3) for one in wanted]
    texts = [result.outputs[0].text for result in rand_llm.generate(["a"] * 4, params, use_tqdm=False)]
    for text in texts[:2]:
        jsonschema.validate(json.loads(text), Flags.model_json_schema())
    assert " " not in texts[1]
    assert texts[2].isdigit()
    assert len(texts[2]) == 2
    assert texts[3] in ("yes", "no")


def test_the_old_name_and_plain_objects(rand_llm: LLM) -> None:
    for given in (
        {"guided_decoding": GuidedDecodingParams(choice=["yes", "no"])},
        {"guided_decoding": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ):
        result = rand_llm.generate("a", SamplingParams(**given), use_tqdm=False)  # type: ignore[arg-type]
        assert result[0].outputs[0].text in ("yes", "no")
        assert result[0].outputs[0].finish_reason == "stop"


def test_steps_are_captured_all_the_same(rand_llm: LLM) -> None:
    """The mask is data of the sampler, after the recorded program."""
    before = rand_llm.get_metrics()
    if before.not_captured:
        pytest.skip(before.not_captured)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]{20}"), max_tokens=30)
    rand_llm.generate(["a"] * 2, params, use_tqdm=False)
    after = rand_llm.get_metrics()
    assert after.captured_steps - before.captured_steps >= 19
    assert after.steps - before.steps == 20


def test_mistakes_are_named_before_anything_runs(rand_llm: LLM) -> None:
    for fields, name in (
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"choice": "abc"}, "structured_outputs.choice"),
        ({"json": 5}, "structured_outputs.json"),
    ):
        with pytest.raises(ParameterError) as caught:
            StructuredOutputsParams(**fields)
        assert caught.value.field == name
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(json={"not": {}}))
    with pytest.raises(ParameterError, match=r"structured_outputs\.json.*not"):
        rand_llm.generate(["a", "b"], [SamplingParams(), bad], use_tqdm=False)
    with pytest.raises(ParameterError, match="old name"):
        SamplingParams(structured_outputs={"regex": "a"}, guided_decoding={"regex": "a"})  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="yaml"):
        SamplingParams(structured_outputs={"yaml": "a"})  # type: ignore[arg-type]
