"""Device family, on torch_mlu."""

from __future__ import annotations

from qiao.contract import Capabilities, DeviceInfo, MemoryInfo, hookimpl

from qiao_cambricon import _sdk
from qiao_cambricon.chips import capabilities_of


@hookimpl
def probe_devices() -> list[DeviceInfo]:
    """The MLUs that torch_mlu sees; none where torch_mlu or torch_mlu_ops is missing."""
    mlu = _sdk.runtime()
    if mlu is None or _sdk.operations() is None or not mlu.is_available():
        return []
    software = ", ".join(f"{name} {version}" for name, version in _sdk.versions().items())
    found = []
    for index in range(mlu.device_count()):
        name = str(mlu.get_device_name(index))
        memory = int(mlu.mem_get_info(index)[1])
        found.append(DeviceInfo(f"cambricon:{index}", f"mlu:{index}", name, 100, f"{name}, {software}", memory))
    return found


@hookimpl
def capabilities(chip: str) -> Capabilities:
    """See ``qiao_cambricon.chips``."""
    return capabilities_of(chip)


@hookimpl
def memory_info(device: str) -> MemoryInfo:
    """As the driver has it."""
    free, total = _sdk.runtime().mem_get_info(device)
    return MemoryInfo(int(free), int(total))


@hookimpl
def synchronize(device: str) -> None:
    """A late fault raises here."""
    _sdk.runtime().synchronize(device)


@hookimpl
def collective_backend() -> str:
    """Cambricon's own."""
    return "cncl"
