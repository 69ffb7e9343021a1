"""Device family on the host CPU."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from qiao.contract import Capabilities, DeviceInfo, MemoryInfo, hookimpl
from torch.utils import _pytree as pytree


def _cpu_model() -> str:
    """The name that the kernel gives, or the machine's architecture where it gives none (most Arm systems)."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model Name", "cpu model") and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@hookimpl
def probe_devices() -> list[DeviceInfo]:
    """The host itself, with the lowest score that still claims a machine."""
    evidence = f"{_cpu_model()}, {os.cpu_count()} logical cores, torch {torch.__version__}"
    return [DeviceInfo("reference:0", "cpu", "cpu", 1, evidence, memory_info("cpu").total)]


@hookimpl
def capabilities(chip: str) -> Capabilities:
    """The same for each CPU: torch itself runs everything."""
    return Capabilities(
        dtypes=("float32", "bfloat16", "float16"),
        kv_layouts=("NHD", "HND"),
        kv_dtypes=("float32", "bfloat16", "float16", "int8"),
        schemes=("dense", "w8a16", "w8a8", "w4a16", "fp8"),
        sdk={"torch": str(torch.__version__)},
    )


@hookimpl
def memory_info(device: str) -> MemoryInfo:
    """What the machine has; the core takes the limits of the container into account by itself."""
    memory = psutil.virtual_memory()
    return MemoryInfo(int(memory.available), int(memory.total))


@hookimpl
def synchronize(device: str) -> None:
    """Nothing to wait for: torch's CPU operators are done when they return."""


@hookimpl
def utilization(device: str) -> float:
    """Busy share of all cores since the previous call; the first call returns 0."""
    return min(1.0, float(psutil.cpu_percent(interval=None)) / 100.0)


@hookimpl
def capture(function: Callable[..., Any], example: tuple[Any, ...], device: str) -> Callable[[], Any]:
    """Runs ``function`` again each time, into the tensors of the first run: plain torch has nothing to record."""
    first = function(*example)

    def replay() -> Any:
        for old, new in zip(pytree.tree_leaves(first), pytree.tree_leaves(function(*example)), strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new)
        return first

    return replay


@hookimpl
def collective_backend() -> str:
    """Gloo, torch's backend for CPUs."""
    return "gloo"
