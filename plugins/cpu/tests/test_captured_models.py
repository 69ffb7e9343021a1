"""Every family of models: its decode steps replayed by the engine against the same steps run by Python, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import qiao_cpu
import torch
from qiao.engine import Engine, EngineConfig
from qiao.engine.request import EngineRequest
from qiao.models import create
from qiao.optable import MatmulOps
from qiao.sampling_params import SamplingParams

from tests.models.families import FAMILIES, config_of
from tests.support.models import cpu_ops, reference_model, token_ids

REFUSED = {"qwen2-moe": "aten.sigmoid"}
"""Parts of names, and the operator that is named first: the gate of an expert that every token visits has no hook."""

SLOTS = (
    *("allocate_kv", "copy_blocks", "write_kv", "attention", "decode_attention", "rms_norm", "add_rms_norm"),
    *("rotary", "rope_write_kv", "silu_mul", "gelu_mul", "cap_logits", "capture"),
    *("route_experts", "combine_experts"),
)
PROMPTS = [token_ids(n, 128, seed=n) for n in (23, 5, 9, 1, 40)]


def native_ops(sample):
    made = MatmulOps("cpu", qiao_cpu.pack_weight, qiao_cpu.matmul, qiao_cpu.expert_matmul)
    slots = {name: getattr(qiao_cpu, name) for name in SLOTS}
    return replace(cpu_ops(), kv_layout="HND", matmul={"dense": made}, sample=sample, **slots)


def run(config, weights, dtype, *, eager):
    """The logits of each step that draws a token, all tokens in their order, and the engine's statistics.

    Sequences join one by one and end at different times; those that take the best token see no sampler when captured.
    """
    seen, tokens = [], []

    def sample(logits, params):
        if not params.all_greedy:
            seen.append(logits.clone())
        return qiao_cpu.sample(logits, params)

    ops = native_ops(sample)
    model = create(config, ops, dtype)
    model.load(weights)
    engine = Engine(
        model,
        ops,
        EngineConfig(
            num_blocks=60,
            block_size=4,
            vocab_size=128,
            max_model_len=96,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            dtype=dtype,
            enforce_eager=eager,
            check_integrity=True,
        ),
    )
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=6 + 3 * i, ignore_eos=True)
        engine.add_request(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params, arrival=0.0))
    while engine.has_work():
        outputs = engine.step()
        assert not any(o.error for o in outputs), outputs
        tokens += [(o.request_id, o.token_ids) for o in outputs]
    return seen, tokens, engine.stats()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_captured_steps_equal_eager_ones(name, dtype):
    config = config_of(name)
    weights = list(reference_model(config).state_dict().items())
    want, want_tokens, _ = run(config, weights, dtype, eager=True)
    got, got_tokens, stats = run(config, weights, dtype, eager=False)
    refused = next((why for part, why in REFUSED.items() if part in name), "")
    assert refused in stats.not_captured and bool(refused) == bool(stats.not_captured)
    assert stats.captured_steps == 0 if refused else stats.captured_steps > 10
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert got_tokens == want_tokens and len(got) > 10
