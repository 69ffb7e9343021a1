"""Device family on the host CPU."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch
from qiao.contract import Capabilities, DeviceInfo, MemoryInfo, Tolerance, hookimpl

from qiao_cpu import native
from qiao_cpu.matmul import rounded_schemes
from qiao_cpu.restore import packing
from qiao_cpu.threads import default_threads, node_advice, pinned_cpus

ROUNDED, ROUNDED_DTYPES = Tolerance(3e-2, 3e-2), ("float32", "float16")
"""What rounding activations to int8 may cost: bfloat16's own tolerance."""

SCORES = {"scalar": 2, "neon": 40}
"""Scores of slow variants; the others get 50. All are above the reference plugin's 1."""


def _model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "cpu model") and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@hookimpl
def probe_devices() -> list[DeviceInfo]:
    """The host itself; evidence says which kernels run and why. ``ValueError`` for a wrong environment variable."""
    advice = node_advice()
    evidence = f"{_model()}, kernels {native.start()}, torch {torch.__version__}" + (f", {advice}" if advice else "")
    score = SCORES.get(native.isa(), 50)
    return [DeviceInfo("cpu:0", "cpu", native.isa(), score, evidence, memory_info("cpu").total)]


@hookimpl
def capabilities(chip: str) -> Capabilities:
    """The same for each instruction set."""
    return Capabilities(
        dtypes=("float32", "bfloat16", "float16"),
        kv_layouts=("HND",),
        kv_dtypes=("float32", "bfloat16", "float16", "int8"),
        schemes=("dense", "w4a16", "w8a16", "w8a8"),
        sdk={"torch": str(torch.__version__), **native.facts()},
        tolerances={
            (f"{hook}.{scheme}", dtype): ROUNDED
            for hook in ("matmul", "expert_matmul")
            for scheme in rounded_schemes()
            for dtype in ROUNDED_DTYPES
        },
        packing=packing(),
    )


@hookimpl
def memory_info(device: str) -> MemoryInfo:
    """What the machine has; the core takes the limits of the container into account by itself."""
    memory = psutil.virtual_memory()
    return MemoryInfo(int(memory.available), int(memory.total))


@hookimpl
def synchronize(device: str) -> None:
    """Nothing to wait for: kernels are done when they return."""


@hookimpl
def set_threads(count: int | None) -> str:
    """Threads of all kernels; see ``qiao_cpu.threads``. Results do not depend on the number."""
    number, reason = default_threads(wanted=count)
    native.start()
    if count is not None:  # start() has taken the default
        native.set_threads(number, pinned_cpus(number))
    advice = node_advice()
    return f"{number} threads ({reason})" + (f"; {advice}" if advice else "")
