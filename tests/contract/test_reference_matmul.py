"""The reference's products against the value of each scheme's weight, element by element in float64."""

import sys

import pytest
import qiao_reference as reference
import torch
from qiao.contract import CATALOG, WeightInfo

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def bound(dtype):
    return CATALOG["matmul"].tolerance[str(dtype).removeprefix("torch.")]


def check(scheme, tensors, info, value, dtype, tokens=3, wide_x=None):
    """``value`` [O][I] is the weight's value by the caller's own formula."""
    x = torch.randn(tokens, info.in_features).to(dtype)
    bias = torch.randn(info.out_features).to(dtype)
    packed = reference.pack_weight(scheme, tensors, info, "cpu")
    got = reference.matmul(x, packed, bias)
    assert got.dtype == dtype
    inputs = x.double() if wide_x is None else wide_x(x)
    want = inputs @ value.T + bias.double()
    torch.testing.assert_close(got.double(), want, atol=bound(dtype).atol, rtol=bound(dtype).rtol)
    plain = reference.matmul(x, packed, None)
    torch.testing.assert_close(plain.double(), want - bias.double(), atol=2 * bound(dtype).atol, rtol=bound(dtype).rtol)
    assert reference.matmul(x[:0], packed, bias).shape == (0, info.out_features)
    return packed


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense(dtype):
    weight = torch.randn(7, 5).to(dtype)
    check("dense", {"weight": weight}, WeightInfo("w", 5, 7), weight.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [-1, 4])
def test_w8a16(dtype, group):
    weight, groups = torch.randint(-128, 128, (6, 12), dtype=torch.int8), 1 if group < 0 else 3
    scale = torch.rand(6, groups) / 100
    value = torch.tensor(
        [[int(weight[o, i]) * float(scale[o, i // 4 if group > 0 else 0]) for i in range(12)] for o in range(6)],
        dtype=torch.float64,
    )
    check("w8a16", {"weight": weight, "scale": scale}, WeightInfo("w", 12, 6, 8, group), value, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "group"), [(12, 4), (12, -1), (7, -1)])
@pytest.mark.parametrize("act_order", [False, True])
def test_w4a16_with_zero_points_from_0_and_act_order(dtype, columns, group, act_order):
    rows, size = 5, group if group > 0 else columns
    weight = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scale, zero = torch.rand(rows, columns // size) / 10, torch.randint(0, 16, (rows, columns // size)).float()
    zero[0, 0], zero[1, 0] = 0, 15
    perm = torch.randperm(columns)
    value = torch.zeros(rows, columns, dtype=torch.float64)
    for o in range(rows):
        for j in range(columns):
            element = (int(weight[o, j]) - float(zero[o, j // size])) * float(scale[o, j // size])
            value[o, perm[j] if act_order else j] = element  # column j belongs to input perm[j]
    tensors = {"weight": weight, "scale": scale, "zero": zero} | ({"perm": perm} if act_order else {})
    packed = check("w4a16", tensors, WeightInfo("w", columns, rows, 4, group, False), value, dtype)
    assert packed.data["weight"].nbytes == rows * ((columns + 1) // 2), "two codes to a byte"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows_scaled", [False, True])
def test_fp8(dtype, rows_scaled):
    weight = torch.randn(6, 8).to(torch.float8_e4m3fn)
    scale = torch.rand(6 if rows_scaled else 1, 1) + 0.1
    check("fp8", {"weight": weight, "scale": scale}, WeightInfo("w", 8, 6, 8), weight.double() * scale.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [9, 2500])
def test_w8a8_is_an_exact_integer_product_of_rounded_tokens(dtype, columns):
    weight = torch.randint(-128, 128, (4, columns), dtype=torch.int8)
    scale = (torch.rand(4, 1) + 0.1) / 100 / columns**0.5

    def rounded(x):
        out = []
        for row in x.float():
            step = row.abs().max() / 127
            out.append(torch.stack([(v / step).round().clamp(-127, 127).double() * step.double() for v in row]))
        return torch.stack(out)

    value = weight.double() * scale.double()
    check("w8a8", {"weight": weight, "scale": scale}, WeightInfo("w", columns, 4, 8), value, dtype, wide_x=rounded)


def test_w8a8_of_a_zero_token_is_the_bias():
    tensors = {"weight": torch.ones(2, 3, dtype=torch.int8), "scale": torch.ones(2, 1)}
    packed = reference.pack_weight("w8a8", tensors, WeightInfo("w", 3, 2, 8), "cpu")
    got = reference.matmul(torch.zeros(1, 3), packed, torch.tensor([1.0, 2.0]))
    assert got.tolist() == [[1.0, 2.0]]


def test_large_sums_of_w8a8_do_not_lose_an_integer():
    columns = 40_000  # 127 * 127 * 40000 > 2^29: float32 would round
    x, codes = torch.full((1, columns), 127.0), torch.full((1, columns), 127, dtype=torch.int8)
    codes[0, 0] = 126
    packed = reference.pack_weight(
        "w8a8", {"weight": codes, "scale": torch.ones(1, 1)}, WeightInfo("w", columns, 1, 8), "cpu"
    )
    want = 127 * 127 * columns - 127
    assert float(reference.matmul(x, packed, None)) == float(torch.tensor(want, dtype=torch.float32))


def test_blocks_of_rows_give_the_same_product(monkeypatch):
    weight, scale = torch.randint(-128, 128, (13, 8), dtype=torch.int8), torch.rand(13, 2)
    packed = reference.pack_weight("w8a16", {"weight": weight, "scale": scale}, WeightInfo("w", 8, 13, 8, 4), "cpu")
    x = torch.randn(2, 8)
    whole = reference.matmul(x, packed, None)
    module = sys.modules["qiao_reference.matmul"]  # the package shows the function of that name
    monkeypatch.setattr(module, "_BLOCK", 8 * 5)
    torch.testing.assert_close(reference.matmul(x, packed, None), whole)


def test_wrong_shapes_and_schemes_are_named():
    with pytest.raises(ValueError, match=r"down_proj: weight \(2, 3\) is not \[3, 2\]"):
        reference.pack_weight("dense", {"weight": torch.zeros(2, 3)}, WeightInfo("down_proj", 2, 3), "cpu")
    with pytest.raises(ValueError, match="w3a16"):
        reference.pack_weight("w3a16", {"weight": torch.zeros(2, 3)}, WeightInfo("w", 3, 2), "cpu")
