"""Mixtures of experts: each row is what its expert's product alone gives, whatever the others chose."""

from __future__ import annotations

import pytest
import qiao_cpu
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qiao.contract import composites

from tests.support.cpu import generator, linear

EXPERTS, SIZE, OUT = 5, 64, 40
EACH = settings(
    max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def layers(scheme):
    return [linear(scheme, OUT, SIZE, group=32 if scheme == "w4a16" else -1, seed=seed) for seed in range(EXPERTS)]


@EACH
@given(data=st.data())
def test_rows_are_those_of_the_plain_product(threads, data):
    scheme = data.draw(st.sampled_from(["dense", "w8a16", "w8a8", "w4a16"]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    chosen = data.draw(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=40))
    threads(data.draw(st.sampled_from([1, 3])))
    made = layers(scheme)
    x = torch.randn(len(chosen), SIZE + 3, generator=generator(1)).to(dtype)[:, :SIZE]
    got = qiao_cpu.expert_matmul(x, tuple(one.packed for one in made), torch.tensor(chosen))
    want = torch.cat([made[expert](x[i : i + 1], None) for i, expert in enumerate(chosen)])
    assert got.dtype == dtype and torch.equal(got, want)


def test_an_expert_that_is_none_is_an_error_and_nothing_is_computed():
    weights = tuple(one.packed for one in layers("dense"))
    for wrong in (-1, EXPERTS, 1 << 40):
        with pytest.raises(IndexError, match="outside the table"):
            qiao_cpu.expert_matmul(torch.ones(2, SIZE), weights, torch.tensor([0, wrong]))
    assert qiao_cpu.expert_matmul(torch.ones(0, SIZE), weights, torch.zeros(0, dtype=torch.int64)).shape == (0, OUT)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 4, 1), (7, 8, 2), (33, 128, 8), (2, 6, 6)])
def test_routing_is_torchs(isa, dtype, rows, experts, top_k, normalise):
    """Logits that are all different, so that there is one right choice."""
    order = torch.stack([torch.randperm(experts, generator=generator(i)) for i in range(rows)])
    logits = ((order - experts / 2) / 16).to(dtype)
    weights, ids = qiao_cpu.route_experts(logits, top_k, normalise)
    want_weights, want_ids = composites.route_experts(logits, top_k, normalise)
    assert torch.equal(ids, want_ids) and weights.dtype == dtype
    torch.testing.assert_close(weights, want_weights)


def test_of_equal_shares_the_lower_expert_comes_first():
    weights, ids = qiao_cpu.route_experts(torch.tensor([[0.0, 2.0, 0.0, 2.0, 0.0]]), 4, True)
    assert ids.tolist() == [[1, 3, 0, 2]] and weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_by_weight(isa, threads, dtype):
    x = torch.randn(9, 3, 70, generator=generator(3)).to(dtype)
    weights = torch.rand(9, 3, generator=generator(4)).to(dtype)
    want = (x.double() * weights.double()[..., None]).sum(1)
    for count in (1, 3):
        threads(count)
        got = qiao_cpu.combine_experts(x, weights)
        torch.testing.assert_close(got.double(), want, atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=1e-2)
        assert torch.equal(got[4:5], qiao_cpu.combine_experts(x[4:5], weights[4:5])), "a token is its own"


@pytest.mark.parametrize("scheme", ["dense", "w4a16"])
def test_a_program_follows_what_is_chosen(scheme):
    weights = tuple(one.packed for one in layers(scheme))
    router = torch.randn(SIZE, EXPERTS, generator=generator(5))

    def layer(x, logits):
        shares, experts = qiao_cpu.route_experts(logits, 2, True)
        rows = x.unsqueeze(1).expand(-1, 2, -1).reshape(-1, SIZE)
        found = qiao_cpu.expert_matmul(rows, weights, experts.reshape(-1))
        return qiao_cpu.combine_experts(found.view(-1, 2, OUT), shares), experts

    x = torch.randn(6, SIZE, generator=generator(6))
    logits = x @ router
    replay = qiao_cpu.capture(layer, (x, logits), "cpu")
    seen = set()
    for seed in range(5):
        x.copy_(torch.randn(6, SIZE, generator=generator(seed)))
        logits.copy_(x @ router)
        got, experts = replay()
        want, wanted = layer(x, logits)
        assert torch.equal(got, want) and torch.equal(experts, wanted)
        seen.add(tuple(experts.flatten().tolist()))
    assert len(seen) == 5


def test_a_profile_runs_the_program_and_clocks_each_call():
    x, weight = torch.randn(6, SIZE, generator=generator(7)), torch.ones(SIZE)

    def twice(x):
        return qiao_cpu.rms_norm(qiao_cpu.rms_norm(x, weight, 1e-6), weight, 1e-6)

    replay = qiao_cpu.capture(twice, (x,), "cpu")
    result = replay()
    x.copy_(torch.randn(6, SIZE, generator=generator(8)))
    calls = replay.program.profile(3)
    assert [name for name, _ in calls] == replay.program.steps() and len(calls) == 2
    assert all(seconds > 0 for _, seconds in calls)
    assert torch.equal(result, twice(x)), "its results are those of a replay"
