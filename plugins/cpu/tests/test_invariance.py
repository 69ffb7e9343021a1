"""A row's result is the same to the bit whatever else is in the step and however many threads there are."""

from __future__ import annotations

import itertools

import pytest
import qiao_cpu
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.cpu import SCHEMES, batch, generator, linear

BITWISE = settings(
    max_examples=12, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products(isa, threads, scheme, dtype):
    made = linear(scheme, 75, 640, dtype, group=-1 if scheme in ("dense", "w8a8") else 64)
    x = torch.randn(110, 640, generator=generator(3)).to(dtype)
    bias = torch.randn(75, generator=generator(4)).to(dtype)
    threads(1)
    alone = torch.cat([made(x[i : i + 1], bias) for i in range(len(x))])
    for count in (1, 2, 3):
        threads(count)
        for rows in (2, 3, 4, 5, 6, 8, 9, 16, 17, 48, 97, 110):
            assert torch.equal(made(x[:rows], bias), alone[:rows]), (count, rows)
        assert torch.equal(made(x[57:64], bias), alone[57:64])


@pytest.mark.parametrize("scheme", ["dense", "w4a16"])
def test_products_by_more_threads_than_there_are_runs_of_strips(threads, scheme):
    made = linear(scheme, 1600, 64, torch.float32, group=-1 if scheme == "dense" else 32)
    x = torch.randn(8, 64, generator=generator(5))
    threads(1)
    alone = torch.cat([made(x[i : i + 1], None) for i in range(len(x))])
    threads(70)
    for rows in (1, 4, 8):
        assert torch.equal(made(x[:rows], None), alone[:rows]), rows


@BITWISE
@given(data=st.data())
def test_dense_products_of_any_shape(threads, data):
    outputs, inputs = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 1000))
    weights, dtype = (data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])) for _ in range(2))
    made = linear("dense", outputs, inputs, weights)
    x = torch.randn(data.draw(st.integers(1, 230)), inputs, generator=generator(5)).to(dtype)
    threads(1)
    alone = torch.cat([made(x[i : i + 1]) for i in range(len(x))])
    first = data.draw(st.integers(0, len(x) - 1))
    last = data.draw(st.integers(first + 1, len(x)))
    threads(data.draw(st.sampled_from([1, 2, 5])))
    assert torch.equal(made(x), alone)
    assert torch.equal(made(x[first:last]), alone[first:last])
    torch.testing.assert_close(alone.double(), x.double() @ made.value.T, atol=3e-2, rtol=3e-2)


KINDS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
]
"""dtypes of activations and of the cache"""


@pytest.mark.parametrize(("dtype", "kept"), KINDS, ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (150, 2.0)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (2, 2)])
def test_attention(isa, threads, heads, kv_heads, window, soft_cap, dtype, kept):
    lengths = [700, 40, 3, 257]
    made = batch(lengths, heads, kv_heads, 48, 16, dtype, kept=kept, window=window, soft_cap=soft_cap)
    threads(1)
    whole = [made.step([(i, 0, n)])[0] for i, n in enumerate(lengths)]
    for count in (1, 2, 3):
        threads(count)
        together = made.step([(i, 0, n) for i, n in enumerate(lengths)])
        assert all(torch.equal(a, b) for a, b in zip(together, whole, strict=True))
        decodes = made.step([(i, n - 1, 1) for i, n in enumerate(lengths)])
        assert all(torch.equal(a, b[-1:]) for a, b in zip(decodes, whole, strict=True))
        for i, n in enumerate(lengths):
            assert torch.equal(made.step([(i, n - 1, 1)])[0], whole[i][-1:])
        for at in (0, 1, 127, 128, 255, 300, 699):
            assert torch.equal(made.step([(0, at, 1)])[0], whole[0][at : at + 1])


@BITWISE
@given(cuts=st.lists(st.integers(1, 399), max_size=6, unique=True), data=st.data())
def test_however_a_prefill_is_cut(threads, cuts, data):
    window = data.draw(st.sampled_from([0, 70]))
    kept = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.int8]))
    block = data.draw(st.sampled_from([16, 5]))
    made = batch([400, 90], 6, 2, 32, block, torch.bfloat16, kept=kept, window=window)
    threads(1)
    whole = made.step([(0, 0, 400)])[0]
    threads(data.draw(st.sampled_from([1, 2, 4])))
    edges = [0, *sorted(cuts), 400]
    parts = [made.step([(1, 89, 1), (0, a, b - a)])[1] for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)


def test_light_operators(isa, threads):
    g = generator(0)
    x, residual = torch.randn(200, 1000, generator=g), torch.randn(200, 1000, generator=g)
    gain = torch.randn(1000, generator=g)
    calls = [
        lambda s: qiao_cpu.rms_norm(x[s], gain, 1e-5),
        lambda s: torch.stack(qiao_cpu.add_rms_norm(x[s].clone(), residual[s].clone(), gain, 1e-5)),
        lambda s: qiao_cpu.silu_mul(x[s]),
        lambda s: qiao_cpu.gelu_mul(x[s]),
    ]
    for call in calls:
        threads(1)
        alone = torch.cat([call(slice(i, i + 1)) for i in range(200)], dim=-2)
        for count in (1, 3):
            threads(count)
            assert torch.equal(call(slice(0, 200)), alone)
