"""Rows of a step find their adapters, whatever mixture it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.layers.lora import AdapterRows, LinearAdapters, Update, group_rows

from tests.support.models import cpu_ops

INPUTS, OUTPUTS = 12, 10
STEPS = st.lists(st.tuples(st.sampled_from([0, 0, 3, 4, 9]), st.integers(1, 4)), min_size=1, max_size=7)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(STEPS)
def test_groups_are_a_partition_of_the_adapted_rows(step: list[tuple[int, int]]) -> None:
    adapters, counts = zip(*step, strict=True)
    owner = [adapter for adapter, count in step for _ in range(count)]
    found: dict[int, int] = {}
    for adapter, rows in group_rows(adapters, counts, "cpu"):
        listed = list(range(len(owner))) if rows is None else rows.tolist()
        assert listed == sorted(listed)
        assert not found.keys() & set(listed)
        found.update(dict.fromkeys(listed, adapter))
    assert found == {row: adapter for row, adapter in enumerate(owner) if adapter}


@settings(derandomize=True, max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 99))
def test_every_row_gets_its_own_update(step: list[tuple[int, int]], seed: int) -> None:
    """Adapter 9 has nothing at this layer, adapter 4 two parts that share A and one that does not."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shared, rows = random(2, INPUTS), AdapterRows()
    parts = {
        3: [Update(0, random(3, INPUTS), random(OUTPUTS, 3))],
        4: [
            Update(0, shared, random(4, 2)),
            Update(4, shared, random(4, 2)),
            Update(8, random(1, INPUTS), random(2, 1)),
        ],
    }
    layer = LinearAdapters(cpu_ops().matmul["dense"], rows, "layer", INPUTS, OUTPUTS, torch.float32)
    whole = {0: torch.zeros(OUTPUTS, INPUTS).double(), 9: torch.zeros(OUTPUTS, INPUTS).double()}
    for number, updates in parts.items():
        layer.put(number, updates)
        whole[number] = torch.zeros(OUTPUTS, INPUTS).double()
        for one in updates:
            whole[number][one.first : one.first + len(one.b)] += one.b.double() @ one.a.double()
    adapters, counts = zip(*step, strict=True)
    owner = [adapter for adapter, count in step for _ in range(count)]
    x, y = random(len(owner), INPUTS), random(len(owner), OUTPUTS)
    wanted = torch.stack([y[i].double() + whole[owner[i]] @ x[i].double() for i in range(len(owner))])
    rows.choose(adapters, counts, "cpu")
    torch.testing.assert_close(layer.add(x, y.clone()).double(), wanted, atol=1e-4, rtol=1e-4)
    rows.clear()
    assert torch.equal(layer.add(x, y.clone()), y)


def test_a_shared_a_is_packed_once_and_dropped_whole() -> None:
    layer = LinearAdapters(cpu_ops().matmul["dense"], AdapterRows(), "layer", INPUTS, OUTPUTS, torch.float32)
    shared = torch.ones(2, INPUTS)
    layer.put(1, [Update(0, shared, torch.ones(4, 2)), Update(4, shared, torch.ones(6, 2))])
    assert layer.nbytes(1) == 4 * (2 * INPUTS + 2 * OUTPUTS)
    layer.drop(1)
    layer.drop(1)
    assert layer.nbytes(1) == 0


@pytest.mark.parametrize("adapters", [[0, 0], []])
def test_no_adapters_no_groups(adapters: list[int]) -> None:
    assert group_rows(adapters, [2] * len(adapters), "cpu") == ()
