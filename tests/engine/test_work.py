"""Estimated work against torch's own count of what transformers' model computes, and against what weights take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.build import build_engine
from qiao.config import EngineArgs
from qiao.engine.work import pairs
from qiao.errors import ParameterError
from torch.utils.flop_counter import FlopCounterMode

from tests.support.checkpoints import rand_checkpoint
from tests.support.engine import request, run

PROMPT, ANSWER, BLOCK = 21, 6, 16


@settings(derandomize=True, max_examples=200, deadline=None)
@given(start=st.integers(0, 40), count=st.integers(1, 40), window=st.integers(1, 50))
def test_pairs_are_those_one_by_one(start: int, count: int, window: int) -> None:
    assert pairs(start, count, window) == sum(min(start + i + 1, window) for i in range(count))


def transformers_flops(folder: Path, lengths: range) -> int:
    """What one token after each of ``lengths`` - 1 others takes, by torch's counter."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    cache, total = None, 0
    for length in lengths:
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            out = model(torch.tensor([[length]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        total += counter.get_total_flops()
    return total


@pytest.mark.parametrize("family", [{}, {"model_type": "mistral", "sliding_window": 8}])
def test_operations_and_bytes_of_an_answer(family: dict[str, object], tmp_path: Path) -> None:
    folder = rand_checkpoint(tmp_path / "model", **family)
    args = {"num_gpu_blocks_override": 8, "max_num_batched_tokens": 512, "threads": 1, "device": "cpu"}
    engine = build_engine(EngineArgs(model=str(folder), enable_mfu_metrics=True, **args)).engine
    run(engine, [request("a", list(range(40, 40 + PROMPT)), max_tokens=ANSWER, ignore_eos=True)])
    found = engine.stats().work
    assert found is not None
    computed = PROMPT + ANSWER - 1
    head = 2 * 64 * 320
    if not family:  # the window's mask saves transformers nothing
        assert found.flops == transformers_flops(folder, range(1, computed + 1)) - (PROMPT - 1) * head
    weights = (4 * 64 * 64 - 2 * 64 * 32 + 3 * 64 * 128) * 2 + 64 * 320
    token = 2 * 2 * 32 * 4  # keys and values of two layers, in float32
    window = 8 if family else 512
    steps = [(PROMPT, PROMPT), *((PROMPT + i, 1) for i in range(1, ANSWER))]
    read = [min(length, window + chunk - 1) for length, chunk in steps]
    assert found.read_bytes == ANSWER * 4 * weights + token * sum(read)
    assert found.write_bytes == computed * token


def test_nothing_is_estimated_unless_asked_for(tmp_path: Path) -> None:
    folder = rand_checkpoint(tmp_path / "model")
    built = build_engine(EngineArgs(model=str(folder), num_gpu_blocks_override=8, device="cpu"))
    assert built.engine.stats().work is None and built.engine.config.residency_sample == 0.0
    assert built.info.kv_block_bytes == BLOCK * 2 * 2 * 32 * 4


@pytest.mark.parametrize("given", [None, 0.5])
def test_blocks_are_timed_by_flag(given: float | None, tmp_path: Path) -> None:
    more = {} if given is None else {"kv_cache_metrics_sample": given}
    args = EngineArgs(model=str(rand_checkpoint(tmp_path)), num_gpu_blocks_override=8, kv_cache_metrics=True, **more)
    engine = build_engine(args).engine
    assert engine.config.residency_sample == (given or 0.01), "vLLM's default is a hundredth"
    assert engine.stats().residency is not None


@pytest.mark.parametrize("sample", [0.0, 1.5, True, "all"])
def test_a_wrong_sample_is_named(sample: object) -> None:
    with pytest.raises(ParameterError, match=r"kv_cache_metrics_sample: must be a number in \(0, 1\]"):
        EngineArgs(model="M", kv_cache_metrics_sample=sample)  # type: ignore[arg-type]
