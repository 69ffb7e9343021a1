"""The only file that looks for software: torch's CUDA, Triton, NVML and the optional libraries of attention."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from qiao_triton import pci

DRIVER = Path("/proc/driver/nvidia/version")
_DISTRIBUTIONS = ("triton", "nvidia-ml-py", "flashinfer-python", "flash-attn")


def runtime() -> Any:
    """``torch.cuda``, or None where this torch is not built with CUDA (but with HIP, or for the host alone)."""
    return torch.cuda if torch.version.cuda is not None and torch.version.hip is None else None


def has_triton() -> bool:
    """Whether a package of that name is there. It is not imported."""
    return find_spec("triton") is not None


def versions() -> dict[str, str]:
    """Of CUDA and of installed distributions."""
    found = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def trouble(sysfs: Path = pci.SYSFS, driver: Path = DRIVER) -> str:
    """Why the NVIDIA GPUs that are in this machine cannot be used, with the remedy; empty where there are none.

    Asked only where torch sees no GPU.
    """
    cards = pci.accelerators(pci.NVIDIA, sysfs)
    if not cards:
        return ""
    seen = f"{len(cards)} NVIDIA device{'s' if len(cards) > 1 else ''} on the PCI bus ({cards[0].address})"
    if not driver.exists():
        held = f", held by the kernel driver {cards[0].driver}" if cards[0].driver not in ("", "nvidia") else ""
        return (
            f"{seen}{held}, but NVIDIA's kernel driver is not loaded: install the package nvidia-driver (Debian) or "
            "nvidia-driver-580-server (Ubuntu) and restart; in a container start it with --gpus all"
        )
    if runtime() is None:
        return (
            f"{seen}, but torch {torch.__version__} is built without CUDA: "
            "pip install torch --index-url https://download.pytorch.org/whl/cu128"
        )
    return (
        f"{seen}, but torch sees none: CUDA_VISIBLE_DEVICES hides them, /dev/nvidia* is not in this container, or the "
        f"driver ({_first_line(driver)}) is too old for CUDA {torch.version.cuda}"
    )


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    except OSError:
        return "unknown"
