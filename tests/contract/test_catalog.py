"""The catalog, the specification classes and the composites say the same."""

import inspect

import pytest
import qiao_reference
from qiao.contract import CATALOG, GROUPS, SPECS, composites

HOOKS = {name: f for spec in SPECS for name, f in vars(spec).items() if not name.startswith("_")}
FAMILY = {name: spec.__name__.removesuffix("Spec").lower() for spec in SPECS for name in vars(spec)}
DTYPES = {"float32", "float16", "bfloat16"}


def test_each_hook_has_an_entry_and_the_other_way_round():
    assert set(CATALOG) == set(HOOKS)
    assert all(name == op.name for name, op in CATALOG.items())


@pytest.mark.parametrize("name", CATALOG)
def test_entry_agrees_with_the_specification(name):
    op, function = CATALOG[name], HOOKS[name]
    parameters = list(inspect.signature(function).parameters)[1:]
    assert [a.name for a in op.args] == parameters
    assert op.family == FAMILY[name]
    assert op.group in (*GROUPS, "")
    assert set(op.mutates) <= set(parameters)
    assert op.optional == function.__doc__.startswith("Optional."), "say in the docstring whether it is optional"
    assert all(bool(a.shape) == bool(a.dtype) for a in (*op.args, *op.results))


@pytest.mark.parametrize("name", CATALOG)
def test_results_are_declared_where_tensors_come_back(name):
    returned = str(inspect.signature(HOOKS[name]).return_annotation)
    count = {"torch.Tensor": 1, "tuple[torch.Tensor, torch.Tensor]": 2, "LogprobOutput": 1}.get(returned, 0)
    assert len(CATALOG[name].results) == count


@pytest.mark.parametrize("name", [n for n, op in CATALOG.items() if op.results])
def test_each_computing_hook_has_a_tolerance_for_each_dtype(name):
    assert set(CATALOG[name].tolerance) >= DTYPES
    assert all(t.atol >= 0 and t.rtol >= 0 for t in CATALOG[name].tolerance.values())


@pytest.mark.parametrize("name", [n for n, op in CATALOG.items() if op.replaces])
def test_what_an_optional_hook_replaces_exists(name):
    for part in CATALOG[name].replaces.split(", "):
        found = getattr(composites, part, None)
        assert found is not None or part in CATALOG
        if part == name:
            assert list(inspect.signature(found).parameters) == [a.name for a in CATALOG[name].args]


@pytest.mark.parametrize("name", CATALOG)
def test_the_reference_has_every_hook_with_the_contracts_arguments(name):
    function = getattr(qiao_reference, name)
    assert list(inspect.signature(function).parameters) == [a.name for a in CATALOG[name].args]
    assert function.qiao_impl, "marked as an implementation"
