"""Whole distributions of a sequence: against transformers, and beside what the engine itself samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from qiao import LLM, SamplingParams
from qiao.engine import scoring
from qiao.errors import KernelError, OverloadedError, ParameterError, PromptTooLongError
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import rand_checkpoint
from tests.support.engine import make_engine, request, run

IDS = [7 * i % 320 for i in range(90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return rand_checkpoint(tmp_path_factory.mktemp("score") / "m")


def make_llm(folder, **options):
    return LLM(str(folder), device="cpu", num_gpu_blocks_override=16, check_integrity=True, **options)


@pytest.mark.parametrize("chunk", [2048, 7, 1])
def test_the_logits_are_transformers(chunk, folder, monkeypatch):
    """However the sequence is cut: chunks of one token go through decode attention."""
    monkeypatch.setattr(scoring, "_SLICE_LOGITS", 320 * 3)
    llm = make_llm(folder, max_num_batched_tokens=chunk)
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([IDS])).logits[0]
    slices = list(llm.token_logits(IDS, 40))
    assert max(len(rows) for rows in slices) <= 3
    torch.testing.assert_close(torch.cat(slices), wanted[40:], atol=1e-3, rtol=1e-3)


def test_what_ran_before_changes_no_bit(folder):
    """Blocks in another order, cached prefixes, and an iterator that was left early."""
    llm = make_llm(folder)
    first = torch.cat(list(llm.token_logits(IDS)))
    llm.generate([IDS[:50], IDS[3:70]], SamplingParams(temperature=0.0, max_tokens=9))
    left = llm.token_logits(IDS)
    next(left)
    left.close()
    assert torch.equal(torch.cat(list(llm.token_logits(IDS))), first)
    assert llm.get_metrics().kv_blocks_used == 0


def test_the_engines_own_log_probabilities(folder):
    """Two ways to the same numbers: prompt log-probabilities of a request."""
    llm = make_llm(folder)
    (result,) = llm.generate([IDS], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
    rows = torch.cat(list(llm.token_logits(IDS))).double().log_softmax(-1).numpy()
    found = [rows[i, token] for i, token in enumerate(IDS[1:])]
    stated = [entry[token].logprob for entry, token in zip(result.prompt_logprobs[1:], IDS[1:], strict=True)]
    np.testing.assert_allclose(found, stated, atol=1e-4)


def test_what_cannot_be_scored_is_refused():
    engine = make_engine()
    with pytest.raises(ParameterError, match="start"):
        engine.token_logits([], 0)
    with pytest.raises(ParameterError, match="start"):
        engine.token_logits([1, 2], 2)
    with pytest.raises(ParameterError, match="vocabulary of 96"):
        engine.token_logits([1, 96])
    with pytest.raises(PromptTooLongError, match="128"):
        engine.token_logits([1] * 129)
    engine.add_request(request("a", [1, 2, 3]))
    with pytest.raises(OverloadedError, match="idle"):
        engine.token_logits([1, 2])
    assert len(run(engine).of("a")) == 8
    assert not math.isnan(float(next(engine.token_logits([1, 2]))[0, 0]))


def test_an_operator_that_fails_is_named_and_leaves_no_block(monkeypatch):
    engine = make_engine()

    def broken(hidden):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(engine._runner.model, "logits", broken)
    with pytest.raises(KernelError, match="no such kernel"):
        list(engine.token_logits([1, 2, 3]))
    assert engine.stats().kv_blocks_used == 0
