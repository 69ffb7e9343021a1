"""The only file that looks for software: torch's HIP, DTK, the driver's folder, Triton and hy-smi."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

HYHAL = Path("/opt/hyhal")
"""Where the driver keeps its libraries; containers have to be given it."""

NODES = (Path("/dev/kfd"), Path("/dev/mkfd"))
"""Of the kernel driver, older and newer."""

MONITOR = "hy-smi"
_SECONDS = 10


def runtime() -> Any:
    """``torch.cuda`` of a torch built for HIP, else None. On a DCU torch calls its devices ``cuda``."""
    return torch.cuda if torch.version.hip is not None else None


def from_hygon() -> bool:
    """Whether this torch is the vendor's: its versions read ``2.9.0+das.opt1.dtk2604``."""
    return re.search(r"\b(das|dtk)", torch.__version__.partition("+")[2]) is not None


def has_triton() -> bool:
    """Whether a package of that name is there. It is not imported."""
    return find_spec("triton") is not None


def triton_from_hygon() -> bool:
    """Whether Triton is the vendor's or FlagTree's build, which know the architectures that public Triton does not."""
    version = versions().get("triton", "")
    return any(mark in version for mark in ("das", "dtk", "hcu"))


def versions() -> dict[str, str]:
    """Of HIP, DTK and Triton, as far as they are there."""
    found = {"hip": torch.version.hip} if torch.version.hip else {}
    if dtk := re.search(r"dtk(\d+)", torch.__version__):
        found["dtk"] = dtk[1]
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    return found


def check_visible(environment: Mapping[str, str] = os.environ) -> None:
    """HIP reads both variables. Raises ``RuntimeError`` where they name different devices."""
    hip, cuda = (environment.get(f"{name}_VISIBLE_DEVICES") for name in ("HIP", "CUDA"))
    if hip is not None and cuda is not None and hip != cuda:
        raise RuntimeError(
            f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} differ, and a DCU honours both: set one of them"
        )


def monitor(*arguments: str) -> Any:
    """What ``hy-smi ARGUMENTS --json`` prints. Raises ``RuntimeError`` where it is missing, fails or prints no JSON."""
    command = shutil.which(MONITOR) or shutil.which(MONITOR, path=str(HYHAL / "bin"))
    if command is None:
        raise RuntimeError(f"{MONITOR} is not on PATH nor in {HYHAL}/bin: it comes with the driver")
    try:
        done = subprocess.run(  # noqa: S603 - the vendor's own monitor
            [command, *arguments, "--json"], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        return json.loads(done.stdout[done.stdout.index("{") :])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise RuntimeError(f"{MONITOR} {' '.join(arguments)} --json failed: {error}") from error
