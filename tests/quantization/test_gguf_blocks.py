"""GGUF blocks kept quantized hold the values that the gguf package dequantizes them to."""

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.quantization.gguf import gguf_form, split_blocks

from tests.support.gguf import HALVES, random_blocks

KINDS = [kind.name for kind in gguf.GGMLQuantizationType if gguf_form(kind.name) is not None]


def blocks(kind: str, rows: int, per_row: int, seed: int) -> np.ndarray:
    return random_blocks(kind, rows * per_row, seed)


def decoded(raw: np.ndarray, kind: str, rows: int) -> np.ndarray:
    return quants.dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType[kind])


def test_the_types_that_this_file_covers():
    assert set(KINDS) == set(HALVES)


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 1 << 30))
@settings(max_examples=20, derandomize=True, deadline=None)
def test_values(kind, rows, per_row, seed):
    raw = blocks(kind, rows, per_row, seed)
    wanted = decoded(raw, kind, rows)
    weight = split_blocks(raw.reshape(-1), kind, wanted.shape)
    assert weight.form == gguf_form(kind)
    assert weight.tensors["weight"].dtype == (torch.uint8 if weight.form.scheme == "w4a16" else torch.int8)
    largest = np.abs(wanted).max(axis=-1, keepdims=True)
    np.testing.assert_allclose(weight.dequantize().numpy(), wanted, rtol=1e-6, atol=float(largest.max()) * 1e-6)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1"])
def test_a_block_of_one_value_has_scale_zero(kind):
    """llama.cpp writes d = 0 and the value as the minimum; the codes then mean nothing, whatever they are."""
    raw = blocks(kind, 2, 2, 0)
    raw[1, 0:2] = 0
    weight = split_blocks(raw.reshape(-1), kind, (2, 64))
    wanted = decoded(raw, kind, 2)
    assert len(np.unique(wanted[0, 32:])) == 1
    np.testing.assert_allclose(weight.dequantize().numpy(), wanted, rtol=1e-6, atol=1e-7)
    assert torch.isfinite(weight.tensors["zero"]).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_block_of_zeros(kind):
    raw = blocks(kind, 1, 2, 0)
    raw[0, 0:2] = 0
    assert not split_blocks(raw.reshape(-1), kind, (1, 64)).dequantize()[0, :32].any()
