"""What is on the PCI bus, read from sysfs: no driver, no runtime and no vendor's library is started for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")

NVIDIA, AMD, HYGON = 0x10DE, 0x1002, 0x1D94
"""Vendor ids."""

_CLASSES = (0x03, 0x0B, 0x12)
"""First byte of a class: display controllers, processors, accelerators; bridges and sound are others."""

_UNIT_OF_PROCESSOR = 0x0B40
"""A co-processor. Hygon's CPUs carry devices of Hygon's vendor id too, of other classes than a DCU's."""


@dataclass(frozen=True, slots=True)
class PciDevice:
    """``address`` as in ``0000:3b:00.0``; ids as numbers; ``driver`` is the kernel's, empty where none is bound."""

    address: str
    vendor: int
    device: int
    kind: int
    driver: str


def accelerators(vendor: int, sysfs: Path = SYSFS) -> list[PciDevice]:
    """Devices of ``vendor`` that compute or display, in the order of their addresses. Empty where there is no sysfs."""
    found = []
    for folder in sorted((sysfs / "bus" / "pci" / "devices").glob("*")):
        try:
            ids = [int((folder / name).read_text("ascii").strip(), 16) for name in ("vendor", "device", "class")]
        except (OSError, ValueError):
            continue  # a device that went away, or one that shows nothing
        kind = ids[2] >> 8
        if ids[0] != vendor or kind >> 8 not in _CLASSES or (kind >> 8 == 0x0B and kind != _UNIT_OF_PROCESSOR):
            continue
        driver = folder / "driver"
        name = driver.resolve().name if driver.exists() else ""
        found.append(PciDevice(folder.name, ids[0], ids[1], kind, name))
    return found
