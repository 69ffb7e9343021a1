"""Variants that this processor may lack: aarch64 under qemu, x86-64's through SIMDe and, for AMX, tiles of our own.

``tests/native/compare.cpp`` compares each with the scalar kernels and each row alone with the row in a batch. What
these builds need is in Debian's packages qemu-user-static, g++-aarch64-linux-gnu and libsimde-dev.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1]
COMPILER = "aarch64-linux-gnu-g++"
QEMU = next((name for name in ("qemu-aarch64-static", "qemu-aarch64") if shutil.which(name)), "")
SIMDE = Path("/usr/include/simde/x86/avx512.h")


def need(missing: dict[str, object]) -> None:
    """Skip, and say so among the warnings too, where a tool is missing."""
    if names := ", ".join(name for name, found in missing.items() if not found):
        message = f"kernels of other processors were NOT tested: {names} not found"
        warnings.warn(message, stacklevel=2)
        pytest.skip(message)


def tool(name: str) -> str:
    """The environment's own build tool, else the system's."""
    own = Path(sys.executable).parent / name
    return str(own) if own.exists() else shutil.which(name) or ""


def compare(name: str, *definitions: str) -> Path:
    """The comparison built in a folder that stays, so that it is only built again where a source changed."""
    folder = SOURCE / "build" / name
    make = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"] if tool("ninja") else []
    definitions = ("-DQIAO_CPU_TESTS=ON", "-DQIAO_OPTIMIZE=-O1", *definitions)
    run(tool("cmake"), "-S", str(SOURCE), "-B", str(folder), *make, *definitions)
    run(tool("cmake"), "--build", str(folder), "--target", "qiao_cpu_compare", "--parallel", str(os.cpu_count()))
    return folder / "qiao_cpu_compare"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def checked(output: str) -> dict[str, int]:
    """Variant -> number of comparisons that were made."""
    return {name: int(count) for name, count in re.findall(r"^(\w+): (\d+) checks$", output, re.MULTILINE)}


@pytest.mark.timeout(1200)
def test_aarch64_under_an_emulator():
    need({"cmake": tool("cmake"), COMPILER: shutil.which(COMPILER), "qemu-user": QEMU})
    system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}")
    processor = "max,sve256=on,sve-default-vector-length=32"
    found = checked(run(QEMU, "-L", "/usr/aarch64-linux-gnu", "-cpu", processor, str(compare("aarch64", *system))))
    assert set(found) == {"scalar", "neon", "neon_dotprod", "neon_i8mm", "sve256"}
    assert min(found.values()) > 1000


@pytest.mark.timeout(1200)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="portable intrinsics on halves of AVX2")
def test_x86_through_portable_intrinsics():
    need({"cmake": tool("cmake"), "libsimde-dev": SIMDE.exists(), "AVX2": "avx2" in Path("/proc/cpuinfo").read_text()})
    wanted = {"avx2_vnni", "avx512", "avx512_bf16", "amx"}
    found = checked(run(str(compare("emulated", "-DQIAO_CPU_EMULATE=ON")), *sorted(wanted)))
    assert set(found) == wanted
    assert min(found.values()) > 1000
