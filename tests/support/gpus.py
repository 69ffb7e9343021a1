"""GPUs that are not here: cards on a bus of files, and what torch shows of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def card(
    sysfs: Path, vendor: str, kind: str = "0x0b4000", address: str = "0000:33:00.0", driver: str = "", device: str = ""
) -> Path:
    """Put a PCI device of ``vendor`` and class ``kind`` into the folder ``sysfs``, which is returned."""
    folder = sysfs / "bus" / "pci" / "devices" / address
    folder.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("device", device or "0x54b7"), ("class", kind)):
        (folder / name).write_text(text + "\n")
    if driver:
        there = sysfs / "bus" / "pci" / "drivers" / driver
        there.mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(there)
    return sysfs


def runtime(properties: Sequence[dict[str, Any]]) -> SimpleNamespace:
    """``torch.cuda`` as far as probes ask it, with a GPU of each of ``properties``."""
    found = [SimpleNamespace(**each) for each in properties]
    return SimpleNamespace(
        is_available=lambda: bool(found),
        device_count=lambda: len(found),
        get_device_properties=lambda index: found[index],
        get_device_name=lambda index: found[index].name,
    )
