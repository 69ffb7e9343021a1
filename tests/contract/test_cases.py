"""The case generator: deterministic, complete, within a chip's capabilities."""

import pytest
import qiao_reference as reference
import torch
from qiao.contract import CATALOG, Capabilities
from qiao.contract.cases import LooseCache, cases, place, smallest

FULL = reference.capabilities("")
HOOKS = {name: getattr(reference, name) for name in CATALOG}
COMPUTING = [name for name in CATALOG if smallest(name, FULL)]


@pytest.mark.parametrize("name", COMPUTING)
def test_arguments_are_the_catalogs_and_ids_are_unique(name):
    found = list(cases(name, FULL))
    assert len({c.id for c in found}) == len(found)
    for case in found:
        assert list(case.arguments) == [a.name for a in CATALOG[name].args]
        assert case.note and case.dtype in CATALOG[name].tolerance


@pytest.mark.parametrize("name", COMPUTING)
def test_the_same_seed_gives_the_same_numbers(name):
    def numbers(seed):
        arguments = [v for c in cases(name, FULL, seed) for v in c.arguments.values()]
        loose = [v.key for v in arguments if isinstance(v, LooseCache)]
        return loose + [v for v in arguments if isinstance(v, torch.Tensor)]

    first, again, other = numbers(3), numbers(3), numbers(4)
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert not first or any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_small_chip_gets_only_what_it_declares():
    chip = Capabilities(
        ("float16",), ("HND",), block_sizes=(128,), head_dims=(64,), schemes=("w8a8",), sliding_window=False,
        soft_cap=False,
    )  # fmt: skip
    for case in cases("attention", chip):
        cache = case.arguments["cache"]
        assert (cache.layout, cache.block_size, cache.key.dtype, cache.key.shape[2]) == ("HND", 128, torch.float16, 64)
        assert (case.arguments["sliding_window"], case.arguments["soft_cap"]) == (0, 0.0)
    assert {c.arguments["weight"].scheme for c in cases("matmul", chip)} == {"w8a8"}


@pytest.mark.parametrize("name", COMPUTING)
def test_the_smallest_case_runs_on_the_reference(name):
    case = smallest(name, FULL)
    arguments = [place(v, HOOKS, "cpu") for v in case.arguments.values()]
    HOOKS[name](*arguments)


def test_a_hook_that_changes_its_arguments_does_not_change_the_case():
    case = smallest("apply_penalties", FULL)
    before = case.arguments["logits"].clone()
    HOOKS["apply_penalties"](*(place(v, HOOKS, "cpu") for v in case.arguments.values()))
    assert torch.equal(case.arguments["logits"], before)
