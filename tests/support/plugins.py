"""Fake plugins: real modules and real distribution metadata in a folder that is put on ``sys.path``."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from qiao.contract import Capabilities, DeviceInfo, MemoryInfo, hookimpl

_NUMBERS = itertools.count()

GOOD = """
from qiao.contract import Capabilities, DeviceInfo, MemoryInfo, hookimpl

@hookimpl
def probe_devices():
    names = ["{name}:" + str(i) for i in range({count})]
    return [DeviceInfo(name, "{torch}", "{name}-chip", {score}, "saw " + name) for name in names]

@hookimpl
def capabilities(chip):
    return Capabilities(dtypes=("float32", "bfloat16"))

@hookimpl
def memory_info(device):
    return MemoryInfo(1, 1)

@hookimpl
def synchronize(device):
    pass
"""


def good_source(name: str, score: int = 10, torch: str = "meta", count: int = 1, extra: str = "") -> str:
    """The source of a valid plugin that claims ``count`` devices, with ``extra`` source after it."""
    return GOOD.format(name=name, score=score, torch=torch, count=count) + extra


class Site:
    """A folder of installed distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def install(
        self,
        name: str,
        source: str,
        *,
        distribution: str | None = None,
        version: str = "1.2.3",
        group: str = "qiao.v1",
        requires: Sequence[str] = (),
    ) -> str:
        """Write a module with ``source`` and a distribution with entry point ``name``; returns its name."""
        module = f"fake_{name}_{next(_NUMBERS)}"
        (self.folder / f"{module}.py").write_text(source)
        package = distribution or f"qiao-{name}"
        info = self.folder / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}"]
        lines += [f"Requires-Dist: {text}" for text in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")
        self.modules.append(module)
        return module

    def imported(self) -> list[str]:
        """The fake modules that have been imported."""
        return [module for module in self.modules if module in sys.modules]

    def forget(self) -> None:
        """Drop the fake modules from ``sys.modules``."""
        for module in self.modules:
            sys.modules.pop(module, None)


def module_with(**functions: Callable[..., Any]) -> ModuleType:
    """A plugin module with the required hooks and ``functions``, which are marked as hook implementations."""
    device = DeviceInfo("fake:0", "meta", "fake-chip", 10, "always there")
    base: dict[str, Callable[..., Any]] = {
        "probe_devices": lambda: [device],
        "capabilities": lambda chip: Capabilities(("float32", "bfloat16")),
        "memory_info": lambda device: MemoryInfo(1, 1),
        "synchronize": lambda device: None,
    }
    module = ModuleType("fake")
    for name, function in {**base, **functions}.items():
        setattr(module, name, hookimpl(function))
    return module
