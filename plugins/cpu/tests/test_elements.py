"""Element-wise kernels and row gathering, against torch on the same values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qiao_cpu import native

from tests.support.cpu import generator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [(1, 1), (3, 37), (1, 20000), (70, 576), (2, 8192)]
EACH = settings(
    max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def place(x):
    """Pointer, row stride and type of a matrix."""
    return x.data_ptr(), x.stride(0), native.TYPES[x.dtype]


def strided(rows, size, dtype, seed):
    """A matrix whose rows are farther apart than they are long; values up to some hundreds."""
    return (torch.randn(rows, size + 5, generator=generator(seed)) * 90).to(dtype)[:, :size]


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_convert_rounds_as_torch_does(isa, threads, rows, size, dtype, to):
    x = strided(rows, size, dtype, 0)
    x[0, 0] = float("inf")
    for count in (1, 3):
        threads(count)
        out = torch.full((rows, size + 3), 7, dtype=to)
        native.check(native.convert(*place(x), *place(out), rows, size))
        assert torch.equal(out[:, :size], x.to(to))
        assert (out[:, size:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_scale_and_add_equal_torch(isa, threads, rows, size, dtype):
    x, y = strided(rows, size, dtype, 1), strided(rows, size, dtype, 2)
    for count in (1, 3):
        threads(count)
        out = torch.empty(rows, size, dtype=dtype)
        native.check(native.scale(*place(x), 0.3, *place(out), rows, size))
        assert torch.equal(out, x * 0.3)
        native.check(native.add(*place(x), *place(y), *place(out), rows, size))
        assert torch.equal(out, x + y)
        wide, mixed = y.float(), torch.empty(rows, size)
        native.check(native.add(*place(x), *place(wide), *place(mixed), rows, size))
        assert torch.equal(mixed, x + wide)


def test_results_may_replace_their_input(isa):
    x = strided(9, 100, torch.bfloat16, 3)
    want = (x + x).clone()
    native.check(native.add(*place(x), *place(x), *place(x), 9, 100))
    assert torch.equal(x, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_cap(isa, dtype):
    x = strided(5, 1000, dtype, 4)
    out = torch.empty(5, 1000)
    native.check(native.soft_cap(*place(x), 30.0, *place(out), 5, 1000))
    torch.testing.assert_close(out.double(), 30 * torch.tanh(x.double() / 30), atol=1e-5, rtol=1e-6)
    assert out.abs().max() <= 30


@EACH
@given(data=st.data())
def test_gathered_rows(threads, data):
    rows, size = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 700))
    dtype = data.draw(st.sampled_from([*DTYPES, torch.int8]))
    table = (torch.randn(40, size + data.draw(st.integers(0, 9)), generator=generator(5)) * 50).to(dtype)[:, :size]
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 39), min_size=rows, max_size=rows)))
    threads(data.draw(st.sampled_from([1, 3])))
    out = torch.empty(rows, size, dtype=dtype)
    width = table.element_size()
    where = (table.data_ptr(), 40, table.stride(0) * width, size * width)
    native.check(native.gather_rows(*where, ids.data_ptr(), out.data_ptr(), rows))
    assert torch.equal(out, table.index_select(0, ids))


@pytest.mark.parametrize("wrong", [-1, 40, 2**40, -(2**62)])
def test_ids_outside_the_table_read_nothing_and_are_told(isa, wrong):
    table = torch.ones(40, 64)
    ids = torch.tensor([3, wrong, 5])
    out = torch.full((3, 64), 7.0)
    with pytest.raises(IndexError, match="outside the table"):
        native.check(native.gather_rows(table.data_ptr(), 40, 256, 256, ids.data_ptr(), out.data_ptr(), 3))
    assert (out[1] == 0).all() and (out[[0, 2]] == 1).all()
