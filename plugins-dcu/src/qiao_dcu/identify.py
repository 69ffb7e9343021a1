"""Whether this machine's devices are Hygon's: by the PCI bus before any runtime starts, then by architecture.

A DCU answers to HIP, calls its devices ``cuda`` in torch, and its first architecture is also AMD's; plugins that told
it by ``"gfx9" in name`` took AMD's kernels for it and brought the driver down.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qiao_triton import pci

from qiao_dcu import _sdk
from qiao_dcu.chips import HYGON_ONLY

OVERRIDE = "QIAO_DCU"
"""``1`` says that HIP's devices are DCUs, ``0`` that they are not, whatever is seen."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``dcu`` is None where nothing seen so far decides; ``why`` says what was seen."""

    dcu: bool | None
    why: str


def by_bus(sysfs: Path = pci.SYSFS, environment: Mapping[str, str] = os.environ) -> Verdict:
    """The override, else what is on the bus. Starts nothing."""
    asked = environment.get(OVERRIDE, "")
    if asked in ("0", "1"):
        return Verdict(asked == "1", f"{OVERRIDE}={asked}")
    hygon, amd, nvidia = (pci.accelerators(vendor, sysfs) for vendor in (pci.HYGON, pci.AMD, pci.NVIDIA))
    if hygon:
        return Verdict(True, f"{len(hygon)} Hygon on the PCI bus ({hygon[0].address}, device {hygon[0].device:#06x})")
    if amd or nvidia:
        return Verdict(False, f"{'AMD' if amd else 'NVIDIA'} on the PCI bus ({(amd or nvidia)[0].address}), no Hygon")
    return Verdict(None, "nothing on the PCI bus that can be seen")


def by_architecture(name: str, vendor_torch: bool) -> Verdict:
    """For HIP's architecture ``name``, where the bus did not decide; ``vendor_torch``: whether torch is Hygon's."""
    name = name.partition(":")[0]
    if name in HYGON_ONLY:
        return Verdict(True, f"{name}, which only Hygon has")
    if name == "gfx906" and vendor_torch:
        return Verdict(True, "gfx906 with Hygon's torch")
    return Verdict(False, f"{name}, and nothing that is Hygon's")


def trouble(sysfs: Path = pci.SYSFS, hyhal: Path = _sdk.HYHAL, nodes: tuple[Path, ...] = _sdk.NODES) -> str:
    """Why the DCUs on the bus cannot be used, with the remedy; asked only where torch sees none."""
    cards = pci.accelerators(pci.HYGON, sysfs)
    if not cards:
        return ""
    seen = f"{len(cards)} Hygon DCU{'s' if len(cards) > 1 else ''} on the PCI bus ({cards[0].address})"
    if not any(node.exists() for node in nodes):
        return (
            f"{seen}, but {nodes[0]} is missing: install the DCU driver (Hygon's rock package); in a "
            "container add --device=/dev/kfd --device=/dev/dri --group-add video"
        )
    if not hyhal.exists():
        return f"{seen}, but {hyhal} is missing, the driver's libraries: in a container add -v {hyhal}:{hyhal}:ro"
    if _sdk.runtime() is None:
        return (
            f"{seen}, but this torch is not built for DTK: take a DTK image or Hygon's own torch, whose version reads "
            "like 2.9.0+das.opt1.dtk2604; it is not on PyPI"
        )
    return f"{seen}, but torch sees none: HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES hides them, or DTK is too new"
