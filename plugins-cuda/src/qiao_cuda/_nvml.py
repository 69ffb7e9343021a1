"""NVIDIA's management library through nvidia-ml-py: how busy a GPU is and whether it is well.

The module imports without a driver; ``nvmlInit`` then raises. All here is optional: without the package nothing is
known, and nothing else changes.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@cache
def library() -> Any:
    """pynvml, started; None where it is not installed or the driver does not answer."""
    if find_spec("pynvml") is None:
        return None
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _handle(nvml: Any, uuid: str) -> Any:
    """By UUID: torch counts the visible devices, NVML all of them."""
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def busy(uuid: str) -> float:
    """Share of the last sampling period in which a kernel ran, 0 to 1.

    Raises ``RuntimeError`` where NVML cannot tell, as for a MIG slice.
    """
    nvml = library()
    if nvml is None:
        raise RuntimeError("NVML is not there: pip install nvidia-ml-py")
    try:
        return min(1.0, float(nvml.nvmlDeviceGetUtilizationRates(_handle(nvml, uuid)).gpu) / 100)
    except nvml.NVMLError as error:
        raise RuntimeError(f"NVML cannot tell: {error}") from error


def health(uuid: str) -> str:
    """What is wrong with the GPU, in words; empty where nothing is or nothing is known.

    Uncorrected memory errors since the driver was loaded, rows that could not be remapped, and heat that slows it down.
    """
    nvml = library()
    if nvml is None:
        return ""
    found = []
    for check in (_errors, _rows, _heat):
        try:
            found.append(check(nvml, _handle(nvml, uuid)))
        except nvml.NVMLError:  # not every chip has every counter
            continue
    return "; ".join(filter(None, found))


def _errors(nvml: Any, handle: Any) -> str:
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    count = nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds)
    return f"{count} uncorrected memory errors" if count else ""


def _rows(nvml: Any, handle: Any) -> str:
    _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    if failed:
        return "a memory row could not be remapped: the GPU should be replaced"
    return "a memory row waits to be remapped: reset the GPU" if pending else ""


def _heat(nvml: Any, handle: Any) -> str:
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    hot = nvml.nvmlClocksThrottleReasonHwThermalSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
    degrees = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    return f"slowed down by heat, {degrees} degrees" if reasons & hot else ""
