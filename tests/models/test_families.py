"""Every family against transformers: the same small random checkpoint, float32."""

from itertools import pairwise

import pytest
import qiao_reference
import torch
from qiao.optable import MatmulOps

from tests.models.families import FAMILIES, config_of
from tests.support.models import Paged, build, counting_ops, cpu_ops, reference_model, token_ids

PROMPT = 41
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request):
    config = config_of(request.param)
    reference = reference_model(config)
    return reference, build(config, reference.state_dict().items())


def _wanted(reference, ids):
    with torch.no_grad():
        return reference(torch.tensor([ids]), use_cache=False).logits[0]


def test_one_prefill_gives_the_reference_logits(pair):
    reference, model = pair
    ids = token_ids(PROMPT, 128)
    got, want = Paged(model).feed(ids), _wanted(reference, ids)
    assert want.std() > 0.1, "the reference must say something"
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


def test_chunks_and_single_steps_give_the_reference_logits(pair):
    reference, model = pair
    ids = token_ids(PROMPT, 128, seed=2)
    paged, bounds = Paged(model), [0, 5, 16, 17, 30, *range(31, PROMPT + 1)]
    got = torch.cat([paged.feed(ids[a:b]) for a, b in pairwise(bounds)])
    torch.testing.assert_close(got, _wanted(reference, ids), atol=TOLERANCE, rtol=TOLERANCE)


def test_greedy_tokens_equal_generate(pair):
    reference, model = pair
    prompt = token_ids(11, 128, seed=3)
    with torch.no_grad():  # without its cache, which some configs break in transformers
        want = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, use_cache=False)[
            0
        ].tolist()
    assert Paged(model).greedy(prompt, 16) == want


@pytest.mark.parametrize("name", [name for name in sorted(FAMILIES) if "moe" in name or "mixtral" in name])
def test_experts_that_are_multiplied_together_give_the_reference_logits(name):
    config = config_of(name)
    reference, calls = reference_model(config), []

    def expert_matmul(x, weights, experts):
        calls.append(len(weights))
        return qiao_reference.expert_matmul(x, weights, experts)

    made = MatmulOps("cpu", qiao_reference.pack_weight, qiao_reference.matmul, expert_matmul)
    model = build(config, reference.state_dict().items(), cpu_ops(matmul={"dense": made}))
    ids = token_ids(PROMPT, 128)
    torch.testing.assert_close(Paged(model).feed(ids), _wanted(reference, ids), atol=TOLERANCE, rtol=TOLERANCE)
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    assert calls and set(calls) == {experts} and len(calls) % 2 == 0


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_described_calls_are_the_calls_made(name):
    config = config_of(name)
    ops, calls, products = counting_ops()
    model = build(config, reference_model(config).state_dict().items(), ops)
    shape = model.shape
    ids = token_ids(256 if shape.experts_per_token else 9, 128)  # enough that every expert gets a token
    paged = Paged(model)
    calls.clear()
    products.clear()
    paged.feed(ids)
    names = (
        "rms_norm",
        "add_rms_norm",
        "rotary",
        "silu_mul",
        "gelu_mul",
        "cap_logits",
        "route_experts",
        "combine_experts",
    )
    light = {name: count for name, count in calls.items() if name in names}
    assert light == dict(shape.fused_calls)
    described = sorted((x.in_features, x.out_features, x.bias) for x in shape.linears for _ in range(x.count))
    assert sorted(products) == described
    assert calls["attention"] == calls["write_kv"] == shape.num_layers


def test_fused_hooks_are_used_where_present():
    config = config_of("qwen3")
    seen = []

    def rope_write_kv(*args):
        seen.append("rope_write_kv")
        return qiao_reference.rope_write_kv(*args)

    def decode_attention(*args):
        seen.append("decode_attention")
        return qiao_reference.decode_attention(*args)

    def refuse(*_):
        raise AssertionError("replaced by rope_write_kv")

    reference = reference_model(config)
    ops = cpu_ops(rope_write_kv=rope_write_kv, decode_attention=decode_attention, rotary=refuse, write_kv=refuse)
    paged, ids = Paged(build(config, reference.state_dict().items(), ops)), token_ids(8, 128)
    paged.feed(ids[:7])
    assert seen == ["rope_write_kv"] * 3
    got = paged.feed(ids[7:])
    assert seen[3:] == ["rope_write_kv", "decode_attention"] * 3
    torch.testing.assert_close(got[0], _wanted(reference, ids)[7], atol=TOLERANCE, rtol=TOLERANCE)
