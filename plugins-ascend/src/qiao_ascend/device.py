"""Device family, on torch_npu."""

from __future__ import annotations

from qiao.contract import Capabilities, DeviceInfo, MemoryInfo, hookimpl

from qiao_ascend import _sdk
from qiao_ascend.chips import capabilities_of, profile


@hookimpl
def probe_devices() -> list[DeviceInfo]:
    """The NPUs that torch_npu sees; none where torch_npu is missing.

    Raises ``RuntimeError`` where versions do not go together, where CANN cannot be loaded, or where the machine's NPUs
    are all of a kind that no profile describes.
    """
    npu = _sdk.runtime()
    if npu is None or not npu.is_available():
        return []
    software = ", ".join(f"{name} {version}" for name, version in _sdk.found().as_dict().items())
    health = _sdk.health()
    chips = [str(npu.get_device_name(index)) for index in range(npu.device_count())]
    if chips and not any(map(profile, chips)):
        raise RuntimeError(f"no profile of {', '.join(sorted(set(chips)))}: 910B, 910C and 310P are known")
    found = []
    for index, chip in enumerate(chips):
        if profile(chip) is None:
            continue
        memory = int(npu.get_device_properties(index).total_memory)
        evidence = "; ".join(filter(None, (f"{chip}, {software}", health)))
        found.append(DeviceInfo(f"ascend:{index}", f"npu:{index}", chip, 100, evidence, memory))
    return found


@hookimpl
def capabilities(chip: str) -> Capabilities:
    """See ``qiao_ascend.chips``."""
    return capabilities_of(chip)


@hookimpl
def memory_info(device: str) -> MemoryInfo:
    """As the driver has it, which counts what other processes hold."""
    free, total = _sdk.runtime().mem_get_info(device)
    return MemoryInfo(int(free), int(total))


@hookimpl
def synchronize(device: str) -> None:
    """A late fault raises here."""
    _sdk.runtime().synchronize(device)


@hookimpl
def utilization(device: str) -> float:
    """Busy share of the AI cores."""
    return min(1.0, max(0.0, float(_sdk.runtime().utilization(device)) / 100.0))


@hookimpl
def collective_backend() -> str:
    """Huawei's own."""
    return "hccl"
