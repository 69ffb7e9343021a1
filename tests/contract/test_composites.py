"""The light operators against formulas in float64."""

import math

import pytest
import torch
from qiao.contract import CATALOG, composites

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(got, want, dtype, hook):
    bound = CATALOG[hook].tolerance[str(dtype).removeprefix("torch.")]
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=bound.atol, rtol=bound.rtol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype):
    x, residual, weight = torch.randn(4, 33).to(dtype), torch.randn(4, 33).to(dtype), torch.randn(33).to(dtype)

    def norm(rows):
        return torch.stack([r / math.sqrt(float(r @ r) / 33 + 1e-6) * weight.double() for r in rows])

    close(composites.rms_norm(x, weight, 1e-6), norm(x.double()), dtype, "rms_norm")
    normed, total = composites.add_rms_norm(x, residual, weight, 1e-6)
    close(total, x.double() + residual.double(), dtype, "add_rms_norm")
    close(normed, norm(x.double() + residual.double()), dtype, "add_rms_norm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [4, 2])
def test_rotary_is_a_turn_of_complex_numbers(dtype, interleaved, pairs):
    query, key = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 1, 8).to(dtype)
    angle = torch.rand(3, pairs) * 7
    got = composites.rotary(query, key, angle.cos(), angle.sin(), interleaved)
    for x, y in zip((query, key), got, strict=True):
        want, turned = x.double().clone(), x.double()[..., : 2 * pairs]
        real, imaginary = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.split(pairs, -1)
        spun = torch.complex(real, imaginary) * torch.exp(1j * angle.double())[:, None]
        first, second = (spun.real, spun.imag)
        joined = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
        want[..., : 2 * pairs] = joined
        close(y, want, dtype, "rotary")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype):
    x = (torch.randn(3, 14) * 3).to(dtype)
    gate, up = x.double()[:, :7], x.double()[:, 7:]
    close(composites.silu_mul(x), gate / (1 + (-gate).exp()) * up, dtype, "silu_mul")
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    close(composites.gelu_mul(x), 0.5 * gate * (1 + inner.tanh()) * up, dtype, "gelu_mul")


def test_soft_cap_is_the_identity_near_zero_and_bounded_far_away():
    x = torch.tensor([[0.0, 0.5, -0.5, 30.0, 1e6, -1e6]])
    got = composites.cap_logits(x, 30.0)
    close(got, 30 * (1 - 2 / (torch.exp(2 * x.double() / 30) + 1)), torch.float32, "cap_logits")
    torch.testing.assert_close(got[0, 1:3], x[0, 1:3], atol=1e-4, rtol=0)
    assert got.abs().max() <= 30
