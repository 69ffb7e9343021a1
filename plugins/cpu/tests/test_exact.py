"""Larger and odd sizes against float64: many rows, long contexts, each packed form."""

from __future__ import annotations

import pytest
import torch
from qiao.contract import CATALOG

from tests.support.cpu import SCHEMES, batch, generator, linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
def test_weight_only_in_float32_rounds_nothing(isa, scheme, group, half_scales):
    for rows in (1, 2, 5, 40):
        x = torch.randn(rows, 320, generator=generator(rows))
        made = linear(scheme, 70, 320, group=group, half_scales=half_scales)
        close("matmul", made(x), x.double() @ made.value.T, torch.float32)


def rounded(x, size):
    """Activations as the kernels see them: ``round(x / step) * step`` with ``step = max|x| / 127`` a stretch."""
    wide = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    step = wide.abs().amax(-1, keepdim=True) / 127
    codes = (wide / torch.where(step > 0, step, 1.0)).round()
    return (codes.double() * step.double()).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("with_zero", [True, False])
@pytest.mark.parametrize("group", [-1, 32, 128])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_int4_with_rounded_activations_is_exact_but_for_the_rounding(isa, dtype, group, with_zero):
    for rows in (1, 3, 9, 50):
        x = torch.randn(rows, 200 if group == -1 else 384, generator=generator(rows)).to(dtype)
        x[0, :64] = 0
        made = linear("w4a16", 45, x.shape[1], group=group, with_zero=with_zero)
        want = rounded(x, 32) @ made.value.T
        torch.testing.assert_close(made(x).double(), want, atol=2e-3 if dtype == torch.float16 else 1.6e-2, rtol=8e-3)
        # and the rounding itself costs little: within bfloat16's own tolerance
        torch.testing.assert_close(made(x).double(), x.double() @ made.value.T, atol=3e-2, rtol=3e-2)


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
