"""The one state of the simulated accelerator: devices, counters, faults.

torch holds a single table of backends for the whole process, and the operators registered there are called without a
context of ours. So the state is per process as well: one object, ``STATE``, which tests reset through the knobs.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

NAME = os.environ.get("QIAO_SIM_NAME", "sim")
"""What torch calls the device; a stand-in for a vendor's SDK takes the vendor's word through the environment."""


class DeviceFault(RuntimeError):  # noqa: N818 - the word that vendors' runtimes use
    """What a vendor runtime would throw for a failed kernel or a lost device."""


@dataclass
class Fault:
    """Raised from the first match after ``skip``, ``times`` times; a ``late`` one at the next synchronising call."""

    match: Callable[[str, int], bool]
    error: Callable[[str], BaseException]
    skip: int = 0
    times: int = 1
    late: bool = False


@dataclass
class Device:
    """One device; sizes in bytes."""

    index: int
    memory: int
    used: int = 0
    peak: int = 0
    lost: bool = False
    pending: list[BaseException] = field(default_factory=list)


@dataclass
class State:
    """Everything that the knobs change.

    ``counts`` has h2d, d2h, d2d, peer (copies), launches and syncs; ``bytes`` the copies' sizes; ``ops`` launches by
    operator. ``seconds_per_copy`` slows each copy down; ``wrong`` scales a hook's floating results by ``1 + value``.
    """

    devices: list[Device] = field(default_factory=list)
    chip: str = "full"
    counts: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    missing_ops: set[str] = field(default_factory=set)
    only_ops: set[str] | None = None
    missing_dtypes: set[torch.dtype] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    seconds_per_copy: float = 0.0
    wrong: dict[str, float] = field(default_factory=dict)
    library: torch.library.Library | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    local: threading.local = field(default_factory=threading.local)

    def current(self) -> int:
        """Index of this thread's current device."""
        return int(getattr(self.local, "index", 0))

    def index_of(self, device: torch.device | str | int | None) -> int:
        """The index that ``device`` means; raises ``RuntimeError`` for one that does not exist."""
        if isinstance(device, int):
            index = device
        else:
            found = torch.device(device).index if device is not None else None
            index = self.current() if found is None else found
        if not 0 <= index < len(self.devices):
            raise RuntimeError(f"invalid device ordinal {NAME}:{index}")
        return index

    def alive(self, index: int) -> Device:
        """The device, or ``DeviceFault`` where it is lost."""
        device = self.devices[index]
        if device.lost:
            raise DeviceFault(f"{NAME}:{index} is lost")
        return device

    def fire(self, name: str, index: int) -> None:
        """Raise, or put aside for the next synchronisation, the fault that waits for ``name``."""
        with self.lock:
            device = self.alive(index)
            for fault in list(self.faults):
                if not fault.match(name, index):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if fault.times == 0:
                    self.faults.remove(fault)
                if not fault.late:
                    raise fault.error(name)
                device.pending.append(fault.error(name))
                return

    def launched(self, name: str) -> None:
        """Count a kernel; inside a replayed capture only the capture counts."""
        if getattr(self.local, "replaying", False):
            return
        with self.lock:
            self.counts["launches"] += 1
            self.ops[name] += 1

    def crossings(self) -> int:
        """Copies between host and device so far."""
        return self.counts["h2d"] + self.counts["d2h"]

    def synchronize(self, index: int) -> None:
        """Count a wait; late faults raise here."""
        self.counts["syncs"] += 1
        device = self.alive(index)
        if device.pending:
            raise device.pending.pop(0)

    def moved(self, kind: str, payload: torch.Tensor) -> None:
        """Count a copy of ``payload``."""
        with self.lock:
            self.counts[kind] += 1
            self.bytes[kind] += payload.numel() * payload.element_size()
        if self.seconds_per_copy:
            time.sleep(self.seconds_per_copy)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ``RuntimeError`` for a dtype that the chip lacks."""
        if dtype in self.missing_dtypes:
            raise RuntimeError(f"{NAME} does not support {dtype}")


STATE = State()


class Block:
    """One device allocation; views share it and the last one frees it."""

    __slots__ = ("__weakref__", "device", "nbytes")

    def __init__(self, device: Device, nbytes: int) -> None:
        with STATE.lock:
            STATE.alive(device.index)
            if device.used + nbytes > device.memory:
                raise torch.OutOfMemoryError(
                    f"{NAME} out of memory: tried to allocate {nbytes} bytes, "
                    f"{device.memory - device.used} of {device.memory} free"
                )
            device.used += nbytes
            device.peak = max(device.peak, device.used)
        self.device, self.nbytes = device, nbytes
        weakref.finalize(self, Block._free, device, nbytes)

    @staticmethod
    def _free(device: Device, nbytes: int) -> None:
        with STATE.lock:
            device.used -= nbytes
