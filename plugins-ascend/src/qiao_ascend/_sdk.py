"""The only file that knows torch_npu, which is imported when first needed and after the versions were looked at."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from qiao_ascend import versions

RUNTIME = "torch_npu"
NZ = 29
"""CANN's number of the format FRACTAL_NZ."""

_SET_UP = "source set_env.sh of CANN (and of NNAL), then start again"


@cache
def found() -> versions.Found:
    """Installed versions, read once a process."""
    return versions.installed()


@cache
def runtime() -> Any:
    """``torch.npu``, or None where torch_npu is not installed.

    Raises ``RuntimeError`` where versions do not go together or CANN's libraries are not found; it says what to do.
    """
    if find_spec(RUNTIME) is None:
        return None
    wrong = versions.problems(found())
    if wrong:
        raise RuntimeError("; ".join(wrong))
    try:
        import_module(RUNTIME)
    except Exception as error:
        raise RuntimeError(f"torch_npu cannot be imported: {_cause(error)}. Is CANN there? {_SET_UP}") from error
    return torch.npu  # type: ignore[attr-defined]


def _cause(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def operation(name: str) -> Callable[..., Any]:
    """torch_npu's operation ``name``; raises ``NotImplementedError`` where this release has none."""
    function = getattr(import_module(RUNTIME), name, None)
    if function is None:
        raise NotImplementedError(f"torch-npu {found().torch_npu} has no {name}")
    return function  # type: ignore[no-any-return]


def atb(name: str) -> Callable[..., Any]:
    """ATB's operation ``name``; raises ``NotImplementedError`` where torch_npu could not load ATB, which is in NNAL."""
    function = operation(name)
    if not hasattr(torch.ops.atb, name):
        release = f" {found().cann}" if found().cann else ""
        raise NotImplementedError(
            f"ATB (libatb.so) is not there: install NNAL{release}, the release of CANN, and source its set_env.sh"
        )
    return function


def nz_empty(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory in the format NZ; ``shape`` names the fractals itself: its last two dimensions are rows and 16."""
    made = operation("empty_with_format")(list(shape), dtype=dtype, device=torch.device(device), acl_format=NZ)
    return made  # type: ignore[no-any-return]


def nz(x: torch.Tensor) -> torch.Tensor:
    """``x`` brought into the format NZ."""
    return operation("npu_format_cast")(x, NZ)  # type: ignore[no-any-return]


def health() -> str:
    """What ``npu-smi`` says that is not OK, empty where all is well or there is no npu-smi."""
    command = shutil.which("npu-smi")
    if command is None:
        return ""
    try:
        done = subprocess.run([command, "info"], capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(f"NPU {number} reports {state}" for number, state in unhealthy(done.stdout))


def unhealthy(text: str) -> list[tuple[str, str]]:
    """(number, state) of each NPU that ``npu-smi info`` does not call OK."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines()]
    chips = [(cells[0].split()[0], cells[1]) for cells in rows if len(cells) == 3 and len(cells[0].split()) == 2]
    return [(n, state) for n, state in chips if n.isdigit() and state.isalpha() and state != "OK"]
