"""Which way dependencies point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source import ROOT, imports, plugin_files, relative


def test_import_linter_contracts_hold() -> None:
    """The layers of the design, as declared in pyproject.toml; qiao_cpu's source is read, installed or not."""
    tool = Path(sys.executable).parent / "lint-imports"
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'plugins/cpu/src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run([tool, "--no-cache"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


SHARED = {"qiao_cuda": ("qiao_triton",), "qiao_dcu": ("qiao_triton",)}
"""Package -> libraries of the repository that it may import; they are no plugins."""


def foreign_imports(path: Path) -> list[str]:
    """What a plugin's file imports of Qiao besides the contract, or of another plugin."""
    own = path.relative_to(ROOT).parts
    package = own[own.index("src") + 1]
    return [
        f"line {line}: {name}"
        for name, line in imports(path)
        if (name.split(".")[0] == "qiao" and not name.startswith("qiao.contract"))
        or (name.startswith("qiao_") and name.split(".")[0] not in (package, *SHARED.get(package, ())))
    ]


KIT = {
    # Finds and loads a plugin as the server does, and runs a model by its plan: it is no plugin itself.
    "plugins/conformance/src/qiao_conformance/target.py",
    "plugins/conformance/src/qiao_conformance/reality.py",
}


def test_plugins_import_only_the_contract() -> None:
    found = {relative(path): found for path in plugin_files() if (found := foreign_imports(path))}
    assert set(found) == KIT


@pytest.mark.parametrize("module", ["qiao", "qiao.errors", "qiao.config", "qiao.cli.main"])
def test_import_stays_light(module: str) -> None:
    """No torch, no vendor module and no plugin comes in with the names that every user imports."""
    code = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(result.stdout.split())
    heavy = {"torch", "transformers", "torch_npu", "torch_mlu", "qiao_reference", "qiao_conformance", "pluggy"}
    assert not loaded & heavy
