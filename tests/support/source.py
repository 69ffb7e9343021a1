"""Reads the repository's own source for the tests of its shape."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "src" / "qiao"


def core_files() -> list[Path]:
    """Every Python file of the core."""
    return sorted(CORE.rglob("*.py"))


def plugin_files() -> list[Path]:
    """Every Python file of a distribution's package outside the core."""
    return sorted(
        path
        for folder in ("plugins/*/src", "plugins-*/src")
        for path in ROOT.glob(folder + "/**/*.py")
        if "build" not in path.parts
    )


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length in lines, docstring and decorators included, of each function and method."""
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            assert node.end_lineno is not None
            yield f"{relative(path)}:{node.lineno} {node.name}", node.end_lineno - start + 1


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute dotted name and line of everything imported, at any depth of the file."""
    package = path.parent
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package
            for _ in range(node.level - 1):
                base = base.parent
            module = ".".join(filter(None, (base.name, node.module)))
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def relative(path: Path) -> str:
    """The path as people write it."""
    return path.relative_to(ROOT).as_posix()
