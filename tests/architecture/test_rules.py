"""Rules that the source keeps: no device names, no unsafe loading, no hidden state, documented names, sizes."""

from __future__ import annotations

import ast
import importlib
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.source import CORE, core_files, functions, plugin_files, relative, tree

DEVICE = re.compile(
    r"(?<![a-z0-9])(cuda|npu|mlu|hip|rocm|musa|xpu|mps|ascend|cambricon|hygon|dcu|nvidia|huawei|torch_npu|torch_mlu)(?![a-z0-9])",
    re.IGNORECASE,
)

DEVICE_EXEMPT = {
    # A metric's name that the field's dashboards ask for, whatever the device.
    "observability/names.py": {"npu_gpu_utilization"},
}
"""File of the core -> the texts in which it may name a device; the comment says why."""

PUBLIC = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def offences(paths: list[Path], rule: Callable[[ast.Module], list[str]]) -> dict[str, list[str]]:
    """File -> what ``rule`` finds in it, for the files where it finds something."""
    return {relative(path): found for path in paths if (found := rule(tree(path)))}


def docstrings(module: ast.Module) -> set[int]:
    """Ids of the nodes that are docstrings or attribute documentation: prose, not code."""
    return {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def device_names(module: ast.Module) -> list[str]:
    """Names, attributes, arguments and strings of ``module`` in which a device is named."""
    prose = docstrings(module)
    found = []
    for node in ast.walk(module):
        if id(node) in prose:
            continue
        texts = [getattr(node, key, None) for key in ("id", "attr", "name", "arg", "module", "value")]
        found += [f"line {getattr(node, 'lineno', '?')}: {t}" for t in texts if isinstance(t, str) and DEVICE.search(t)]
    return found


def test_the_device_grep_can_fail() -> None:
    for code in ("x.is_cuda", "import torch_npu", "d = 'mlu:0'", "def f(npu): ...", "def use_rocm(): ..."):
        assert device_names(ast.parse(code)), code
    assert not device_names(ast.parse('"""On cuda."""\nchip = 1'))


def test_core_names_no_device() -> None:
    found = offences(core_files(), device_names)
    for name, allowed in DEVICE_EXEMPT.items():
        file = relative(CORE / name)
        found[file] = [text for text in found[file] if text.split(": ", 1)[1] not in allowed]
    assert not {file: texts for file, texts in found.items() if texts}


def test_exemptions_are_still_needed() -> None:
    for name, allowed in DEVICE_EXEMPT.items():
        found = {text.split(": ", 1)[1] for text in device_names(tree(CORE / name))}
        assert allowed <= found, f"{name} does not need all of its exemptions any more"


UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load", "os.system"}


def unsafe(module: ast.Module) -> list[str]:
    """Imports and calls that run code from data."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
            found.append(f"line {node.lineno}: {ast.unparse(node.func)}")
    return found


def test_the_search_for_unsafe_code_can_fail() -> None:
    for code in ("import pickle", "from pickle import loads", "torch.load(x)", "eval(x)"):
        assert unsafe(ast.parse(code)), code
    assert not unsafe(ast.parse("model.eval()\nast.literal_eval(x)"))


def test_nothing_runs_code_from_data() -> None:
    assert not offences(core_files() + plugin_files(), unsafe)


MUTABLE_CALLS = {"dict", "list", "set", "defaultdict", "deque", "OrderedDict", "Counter", "WeakKeyDictionary"}


def hidden_state(module: ast.Module) -> list[str]:
    """Module-level containers under a variable's name (constants are upper case), and ``global`` statements."""
    found = [f"line {node.lineno}: global" for node in ast.walk(module) if isinstance(node, ast.Global)]
    for node in module.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        container = isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)) or (
            isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in MUTABLE_CALLS
        )
        if not container:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[union-attr]
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        found += [f"line {node.lineno}: {n}" for n in names if n != "__all__" and n != n.upper()]
    return found


def test_the_search_for_hidden_state_can_fail() -> None:
    for code in ("cache = {}", "_seen: set[int] = set()", "def f():\n global x\n x = 1"):
        assert hidden_state(ast.parse(code)), code
    assert not hidden_state(ast.parse("__all__ = ['a']\nNAMES = ['a']\ndef f():\n cache = {}"))


def test_no_module_keeps_mutable_state() -> None:
    assert not offences(core_files() + plugin_files(), hidden_state)


def undocumented(module: ast.Module) -> list[str]:
    """Public functions and classes of ``module``, and public methods of public classes, without a docstring."""
    bare = [] if ast.get_docstring(module) or not module.body else ["module"]
    todo: list[ast.AST] = [module]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if not isinstance(node, PUBLIC) or node.name.startswith("_"):
                continue
            overload = any(ast.unparse(d).endswith((".setter", "overload")) for d in node.decorator_list)
            if not ast.get_docstring(node) and not overload:
                bare.append(f"line {node.lineno}: {node.name}")
            if isinstance(node, ast.ClassDef):
                todo.append(node)
    return bare


def test_every_public_name_is_documented() -> None:
    assert not offences(core_files() + plugin_files(), undocumented)


def test_public_names_resolve() -> None:
    package = importlib.import_module("qiao")
    assert package.__all__ and len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)
    assert {"LLM", "SamplingParams", "RequestOutput", "CompletionOutput"} <= set(package.__all__)
    with pytest.raises(AttributeError):
        _ = package.no_such_name


def test_every_package_lists_what_it_has() -> None:
    """``__all__`` of each package resolves, so that no name in it is stale."""
    for path in core_files():
        if path.name == "__init__.py":
            module = importlib.import_module(".".join(path.parent.relative_to(CORE.parent).parts))
            for name in getattr(module, "__all__", ()):
                assert hasattr(module, name), f"{module.__name__}.{name}"


def percentile_95(sizes: list[int]) -> float:
    """The 95th percentile of ``sizes``."""
    return statistics.quantiles(sizes, n=20, method="inclusive")[-1]


def test_functions_stay_small() -> None:
    sizes = {name: size for path in core_files() + plugin_files() for name, size in functions(path)}
    assert not {name: size for name, size in sizes.items() if size > 80}
    assert percentile_95(list(sizes.values())) <= 40


def test_files_stay_small() -> None:
    sizes = {relative(p): p.read_text(encoding="utf-8").count("\n") for p in core_files() + plugin_files()}
    assert not {name: size for name, size in sizes.items() if size > 500}
    assert percentile_95(list(sizes.values())) <= 350
