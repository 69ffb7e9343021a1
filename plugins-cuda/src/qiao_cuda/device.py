"""What of the device family is NVIDIA's own."""

from __future__ import annotations

from typing import Any

from qiao.contract import Capabilities, DeviceInfo, hookimpl

from qiao_cuda import _nvml, _sdk
from qiao_cuda.chips import capabilities_of, chip_of

OLDEST = (7, 5)
"""Compute capability. Triton and torch have left older ones."""


@hookimpl
def probe_devices() -> list[DeviceInfo]:
    """The GPUs that torch sees, from compute capability 7.5 on.

    Raises ``RuntimeError`` with a remedy where there are NVIDIA GPUs but no driver, a torch without CUDA, no Triton, or
    where all of them are too old.
    """
    cuda = _sdk.runtime()
    if cuda is None or not cuda.is_available():
        if trouble := _sdk.trouble():
            raise RuntimeError(trouble)
        return []
    if not _sdk.has_triton():
        raise RuntimeError("Triton is missing, in which the kernels are written: pip install triton")
    found = [_device(cuda, index) for index in range(cuda.device_count())]
    usable = [info for info in found if info is not None]
    if found and not usable:
        raise RuntimeError(f"{cuda.get_device_name(0)} is older than compute capability 7.5, the oldest that is served")
    return usable


def _device(cuda: Any, index: int) -> DeviceInfo | None:
    properties = cuda.get_device_properties(index)
    if (properties.major, properties.minor) < OLDEST:
        return None
    software = ", ".join(f"{name} {version}" for name, version in _sdk.versions().items())
    ill = _nvml.health(str(properties.uuid))
    evidence = "; ".join(filter(None, (f"{properties.name}, {software}", ill)))
    chip = chip_of(properties.major, properties.minor)
    return DeviceInfo(f"cuda:{index}", f"cuda:{index}", chip, 100, evidence, int(properties.total_memory))


@hookimpl
def capabilities(chip: str) -> Capabilities:
    """See ``qiao_cuda.chips``."""
    return capabilities_of(chip)


@hookimpl
def utilization(device: str) -> float:
    """By NVML; raises ``RuntimeError`` where that cannot tell."""
    return _nvml.busy(str(_sdk.runtime().get_device_properties(device).uuid))
