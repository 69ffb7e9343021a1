"""What of the device family is Hygon's own."""

from __future__ import annotations

from typing import Any

import torch
from qiao.contract import Capabilities, DeviceInfo, hookimpl

from qiao_dcu import _sdk, identify
from qiao_dcu.chips import capabilities_of, profile_of

_BUSY = ("HCU use (%)", "DCU use (%)")
"""Keys of hy-smi, new and old."""


@hookimpl
def probe_devices() -> list[DeviceInfo]:
    """The DCUs that torch sees, and only those: AMD's and NVIDIA's GPUs are left to others.

    Raises ``RuntimeError`` with a remedy where there are DCUs but no driver, torch, or Triton for them.
    """
    bus = identify.by_bus()
    if bus.dcu is False:
        return []
    hip = _sdk.runtime()
    if hip is None or not hip.is_available():
        if trouble := identify.trouble():
            raise RuntimeError(trouble)
        return []
    _sdk.check_visible()
    names = [str(hip.get_device_properties(index).gcnArchName) for index in range(hip.device_count())]
    verdicts = [bus if bus.dcu else identify.by_architecture(name, _sdk.from_hygon()) for name in names]
    if not any(verdict.dcu for verdict in verdicts):
        return []
    _check_triton([name for name, verdict in zip(names, verdicts, strict=True) if verdict.dcu])
    return [_device(hip, i, names[i], verdict.why) for i, verdict in enumerate(verdicts) if verdict.dcu]


def _check_triton(names: list[str]) -> None:
    if not _sdk.has_triton():
        raise RuntimeError("Triton is missing, in which the kernels are written: install the wheel of your DTK release")
    lacking = [name for name in names if not profile_of(name).public_triton]
    if lacking and not _sdk.triton_from_hygon():
        raise RuntimeError(
            f"Triton {_sdk.versions().get('triton', '')} cannot compile for {lacking[0].partition(':')[0]}: install "
            "Hygon's own, whose version reads like 3.3.0+das.opt1.dtk2604, or FlagTree for hcu"
        )


def _device(hip: Any, index: int, architecture: str, why: str) -> DeviceInfo:
    properties, profile = hip.get_device_properties(index), profile_of(architecture)
    software = ", ".join(f"{name} {version}" for name, version in _sdk.versions().items())
    evidence = f"{properties.name} ({profile.architecture}, {profile.product}), {software}; {why}"
    chip = profile.architecture
    return DeviceInfo(f"dcu:{index}", f"cuda:{index}", chip, 100, evidence, int(properties.total_memory))


@hookimpl
def capabilities(chip: str) -> Capabilities:
    """See ``qiao_dcu.chips``."""
    return capabilities_of(chip)


@hookimpl
def utilization(device: str) -> float:
    """By hy-smi, which counts all cards: raises ``RuntimeError`` where it is missing or does not show this one."""
    return busy(_sdk.monitor("--showuse"), torch.device(device).index or 0)


def busy(report: Any, index: int) -> float:
    """Busy share of card ``index`` of what ``hy-smi --showuse --json`` printed, 0 to 1."""
    card = report.get(f"card{index}") if isinstance(report, dict) else None
    value = next((card[key] for key in _BUSY if key in card), None) if isinstance(card, dict) else None
    try:
        return min(1.0, max(0.0, float(str(value).rstrip("%")) / 100))
    except ValueError:
        raise RuntimeError(f"hy-smi shows no use of card {index}") from None
