"""What is written is what Qiao's own readers read, and what the formats' definitions say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.errors import ModelError
from qiao.quantization import method_of
from qiao.quantization.packing import pack, unpack
from qiao.quantize.formats import check_shape, write_weight
from qiao.quantize.grid import Rounded, group_index
from qiao.quantize.options import Options

from tests.support.quantizers import words

SEEDS = st.integers(0, 2**32 - 1)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(bits=st.sampled_from([2, 3, 4, 8]), rows=st.integers(1, 5), units=st.integers(1, 4), seed=SEEDS)
def test_packed_codes_come_back_and_lie_as_one_long_number(bits: int, rows: int, units: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, 32 * units))
    packed = pack(torch.tensor(codes, dtype=torch.uint8), bits)
    np.testing.assert_array_equal(packed.numpy(), words(codes, bits))
    np.testing.assert_array_equal(unpack(packed, bits).numpy(), codes)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    kind=st.sampled_from(
        [("awq", 4), ("gptq", 2), ("gptq", 3), ("gptq", 4), ("gptq", 8), ("rtn", 2), ("rtn", 3), ("rtn", 4), ("rtn", 8)]
    ),
    group=st.sampled_from([32, 64, -1]),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    symmetric=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    act_order=st.booleans(),
    seed=SEEDS,
)
def test_a_written_weight_is_read_with_its_values(
    kind: tuple[str, int],
    group: int,
    blocks: tuple[int, int],
    symmetric: bool,
    dtype: torch.dtype,
    act_order: bool,
    seed: int,
) -> None:
    method, bits = kind
    order = "group" if act_order and method == "gptq" and group > 0 else "none"
    options = Options(method=method, bits=bits, group=group, symmetric=symmetric, act_order=order)
    random = np.random.default_rng(seed)
    rows, columns = 32 * blocks[0], 64 * blocks[1]
    groups = columns // group if group > 0 else 1
    owner = group_index(columns, group)
    owner = owner[torch.tensor(random.permutation(columns))] if order == "group" else owner
    low = 1 << (bits - 1) if symmetric else 1
    high = low + 1 if symmetric else 1 << bits
    weight = Rounded(
        codes=torch.tensor(random.integers(0, 1 << bits, (rows, columns)), dtype=torch.uint8),
        scale=torch.tensor(random.uniform(1e-3, 1e-1, (rows, groups))).to(dtype).float(),
        zero=torch.tensor(random.integers(low, high, (rows, groups)), dtype=torch.uint8),
        group=owner,
    )
    read = method_of(options.quantization_config()).weight("m", write_weight(weight, options, dtype))
    want = (weight.codes.double() - weight.zero.double()[:, owner]) * weight.scale.double()[:, owner]
    torch.testing.assert_close(read.dequantize().double(), want, rtol=1e-6, atol=0)
    assert tuple(read.shape) == (rows, columns)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((64, 576), {"group": 128}, ["layers.0.x", "576", "--group 64 or 32 or -1"]),
        ((64, 100), {"group": -1, "bits": 3}, ["layers.0.x", "100 inputs of 3 bits"]),
        ((30, 64), {"group": 64}, ["layers.0.x", "30 outputs of 4 bits"]),
        ((30, 64), {"group": 64, "method": "awq"}, ["layers.0.x", "30", "--method gptq"]),
    ],
)
def test_shapes_that_the_formats_cannot_hold_are_refused_by_name(shape, options, words) -> None:
    with pytest.raises(ModelError) as caught:
        check_shape("layers.0.x", shape, Options(**options))
    for word in words:
        assert word in str(caught.value)
