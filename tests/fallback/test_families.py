"""The price is exact for other shapes of models too: biases, norms on heads, windows and caps, partial ropes."""

from __future__ import annotations

import pytest
import torch
from qiao.engine import Engine, EngineConfig
from qiao.models import create, describe
from qiao.registry import FallbackCounters, Policy, bind, make_plan
from qiao_conformance import sim

from tests.support.checkpoints import rand_config
from tests.support.fallback import BLOCK, PROMPTS, Crossing, Spy, host_backend, request, sim_backend

FAMILIES = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 8},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
}


def serve(config, weights, backend, plan):
    counters = FallbackCounters()
    table = bind(plan, backend, counters)
    model = Spy(create(config, table, torch.float32))
    model.load(weights.items())
    sizes = EngineConfig(
        num_blocks=32,
        block_size=BLOCK,
        vocab_size=config.vocab_size,
        max_model_len=64,
        max_num_seqs=8,
        enforce_eager=True,  # as a plan prices it
    )
    engine = Engine(model, table, sizes)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(request(str(i), prompt, max_tokens=4))
    tokens, crossings = {}, []
    while engine.has_work():
        with sim.counted() as counted:
            for output in engine.step():
                assert output.error is None
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        crossings.append(Crossing.of(model.step, counted))
    return tokens, crossings


@pytest.mark.parametrize(
    "missing", [(), ("attention",), ("matmul",), ("expert_matmul",)], ids=lambda m: "+".join(m) or "nothing"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_and_exact_price(family, missing):
    from transformers import AutoModelForCausalLM

    config = rand_config(model_type=family, **FAMILIES[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        weights = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    shape = describe(config)
    host, backend = host_backend(), sim_backend(missing)
    policy = Policy.parse("allow")
    plan = make_plan(shape, backend, policy, block_size=BLOCK)
    wanted, _ = serve(config, weights, host, make_plan(shape, host, policy, block_size=BLOCK))
    tokens, crossings = serve(config, weights, backend, plan)
    assert tokens == wanted
    priced = [Crossing.priced(plan, crossing.step) for crossing in crossings]
    if shape.experts_per_token and {"matmul", "expert_matmul"} & set(missing):
        check_bound(plan, crossings, priced, missing)
    else:
        assert crossings == priced


def check_bound(plan, crossings, priced, missing):
    """Which experts are used is known at run time: the price is an upper bound, and says so."""
    assert plan.as_dict()["total"]["estimate"]
    for counted, bound in zip(crossings, priced, strict=True):
        assert counted.bytes_to_device <= bound.bytes_to_device
        assert counted.copies_to_device <= bound.copies_to_device
        assert counted.bytes_to_host <= bound.bytes_to_host
        assert counted.copies_to_host <= bound.copies_to_host
    if "matmul" not in missing:
        assert crossings == priced  # each layer of this model has experts, so even the counts are exact
