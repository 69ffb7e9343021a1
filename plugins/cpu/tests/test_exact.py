"""Larger and odd sizes against float64: many rows, long contexts, each packed form."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qiao.contract import CATALOG
from qiao_cpu import native
from qiao_cpu.matmul import ROUND_VARIABLE

from tests.support.cpu import SCHEMES, batch, generator, linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def finest(scheme):
    """The largest code of activations beside weights of a scheme."""
    return native.finest() if scheme == "w8a16" else 127


def close(hook, got, want, dtype):
    tolerance = CATALOG[hook].tolerance[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(got.double(), want, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 13, 61, 205])
def test_dense(isa, rows, dtype):
    for outputs, inputs in ((33, 601), (130, 256), (5, 3), (600, 1)):
        x = torch.randn(rows, inputs, generator=generator(1)).to(dtype)
        bias = torch.randn(outputs, generator=generator(2)).to(dtype)
        made = linear("dense", outputs, inputs, dtype)
        close("matmul", made(x, bias), x.double() @ made.value.T + bias.double(), dtype)


@pytest.mark.parametrize("half_scales", [True, False], ids=["fp16-scales", "fp32-scales"])
@pytest.mark.parametrize(
    ("scheme", "group"), [("w8a16", -1), ("w8a16", 48), ("w4a16", -1), ("w4a16", 64), ("w4a16", 20)]
)
def test_weight_only_rounds_nothing_where_asked(isa, monkeypatch, scheme, group, half_scales):
    monkeypatch.setenv(ROUND_VARIABLE, "0")
    for rows in (1, 2, 5, 40):
        x = torch.randn(rows, 320, generator=generator(rows))
        made = linear(scheme, 70, 320, group=group, half_scales=half_scales)
        close("matmul", made(x), x.double() @ made.value.T, torch.float32)


def rounded(x, size, finest=127):
    """What kernels see of activations: ``round(x * (finest / max|x|)) * (max|x| / finest)``, ``size`` at a time."""
    wide = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    most = wide.abs().amax(-1, keepdim=True)
    codes = (wide * torch.where(most > 0, torch.full_like(most, finest) / most, 0.0)).round()
    return (codes.double() * (most / finest).double()).flatten(1)[:, : x.shape[1]]


ROUNDED = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Bounds where activations are taken as the kernels round them: what is left is the rounding of sums and results."""


@pytest.mark.parametrize("zeros", ["whole", "one", "eight", "quotient", "none"])
@pytest.mark.parametrize("group", [-1, 16, 32, 128])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
def test_rounded_activations_are_all_that_is_lost(isa, scheme, group, zeros):
    for dtype, rows in itertools.product(DTYPES, (1, 3, 9, 50)):
        x = torch.randn(rows, 200 if group == -1 else 1152, generator=generator(rows)).to(dtype)
        x[0, :64] = 0
        made = linear(scheme, 45, x.shape[1], group=group, zeros=zeros)
        want = rounded(x, 16 if group == 16 else 32, finest(scheme)) @ made.value.T
        torch.testing.assert_close(made(x).double(), want, atol=ROUNDED[dtype], rtol=ROUNDED[dtype] / 2)
        # and the rounding itself costs little: within bfloat16's own tolerance
        torch.testing.assert_close(made(x).double(), x.double() @ made.value.T, atol=3e-2, rtol=3e-2)


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rounded_products_of_any_shape(isa, data):
    scheme = data.draw(st.sampled_from(["w4a16", "w8a16"]))
    zeros = data.draw(st.sampled_from(["whole", "eight", "none"]))
    outputs, inputs = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 1200))
    rows, group = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([-1, 16, 32, 48, 64, 128]))
    dtype = data.draw(st.sampled_from(DTYPES))
    order = torch.randperm(inputs, generator=generator(inputs))
    extra = {"perm": order} if data.draw(st.booleans()) else {}
    x = torch.randn(rows, inputs, generator=generator(rows)).to(dtype)
    made = linear(scheme, outputs, inputs, group=group, zeros=zeros, half_scales=data.draw(st.booleans()), **extra)
    block = 16 if group in (16, 48) and inputs > group else 32  # where there is one group, any block is in it
    want = rounded(x[:, order] if extra else x, block, finest(scheme)) @ made.value.T
    torch.testing.assert_close(made(x).double(), want, atol=ROUNDED[dtype], rtol=ROUNDED[dtype] / 2)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "w8a8"])
def test_tiny_and_huge_activations_round_without_trouble(isa, scheme):
    made = linear(scheme, 20, 64, torch.float32)
    for size in (1e-44, 1e-38, 1e-30, 1e30):
        x = torch.full((2, 64), size)
        x[:, 1::3] *= -0.5
        want = x.double() @ made.value.T
        torch.testing.assert_close(made(x).double(), want, atol=max(size * 0.05, 1e-33), rtol=3e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_with_rounded_activations(isa, dtype):
    for rows in (1, 4, 11, 49):
        x = torch.randn(rows, 1030, generator=generator(rows)).to(dtype)
        made = linear("w8a8", 37, 1030)
        close("matmul", made(x), rounded(x, 1030) @ made.value.T, dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_nan_stays_in_its_row(isa, scheme):
    x = torch.randn(9, 96, generator=generator(0)).bfloat16()
    made = linear(scheme, 20, 96, torch.bfloat16)
    clean = made(x)
    x[4, 7] = float("nan")
    out = made(x)
    assert out[4].isnan().all()
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(out[kept], clean[kept])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_may_be_strided_views(isa, scheme):
    wide = torch.randn(8, 200, generator=generator(0)).bfloat16()
    made = linear(scheme, 20, 96, torch.bfloat16)
    assert torch.equal(made(wide[:, 50:146]), made(wide[:, 50:146].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block", "window", "soft_cap"),
    [
        (9, 3, 64, 16, 0, 0.0),
        (4, 4, 80, 16, 0, 0.0),
        (8, 1, 20, 5, 37, 0.0),
        (14, 2, 128, 256, 200, 3.0),
        (6, 3, 36, 32, 0, 30.0),
    ],
)
def test_attention(isa, heads, kv_heads, size, block, window, soft_cap, dtype):
    made = batch([301, 17, 1, 129], heads, kv_heads, size, block, dtype, window=window, soft_cap=soft_cap)
    for i, got in enumerate(made.step([(0, 0, 301), (1, 0, 17), (2, 0, 1), (3, 0, 129)])):
        close("attention", got, made.exact(i), dtype)
    for i, got in enumerate(made.step([(0, 300, 1), (1, 16, 1), (2, 0, 1), (3, 128, 1)])):
        close("attention", got, made.exact(i)[-1:], dtype)
