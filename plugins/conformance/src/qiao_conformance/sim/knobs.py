"""What tests turn: number and size of devices, counters, faults, lost devices, slow copies, wrong numbers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from qiao_conformance.sim.backend import register
from qiao_conformance.sim.chips import chip as profile
from qiao_conformance.sim.device import SimTensor
from qiao_conformance.sim.state import STATE, Device, DeviceFault, Fault


def setup(devices: int = 1, memory: int = 1 << 30, chip: str = "full") -> None:
    """Register the backend (once a process) and start over with ``devices`` of ``memory`` bytes each."""
    profile(chip)
    register()
    STATE.devices = [Device(i, memory) for i in range(devices)]
    STATE.chip = chip
    reset()


def reset() -> None:
    """Counters to zero, all faults and limits forgotten; devices and their memory stay."""
    for counter in (STATE.counts, STATE.bytes, STATE.ops):
        counter.clear()
    STATE.missing_ops.clear()
    STATE.faults.clear()
    STATE.wrong.clear()
    STATE.only_ops, STATE.seconds_per_copy = None, 0.0
    STATE.missing_dtypes = profile(STATE.chip).missing_dtypes
    for device in STATE.devices:
        device.lost, device.pending = False, []


def fail(
    op: str,
    *,
    device: int | None = None,
    skip: int = 0,
    times: int = 1,
    late: bool = False,
    error: Callable[[str], BaseException] | None = None,
) -> None:
    """Make the (skip+1)-th matching call fail. ``op`` is ``aten.mm``, ``copy.h2d``, ``hook.attention`` or ``*``."""

    def match(name: str, index: int) -> bool:
        return (op in ("*", name)) and device in (None, index)

    STATE.faults.append(Fault(match, error or _launch_failed, skip, times, late))


def _launch_failed(name: str) -> BaseException:
    return DeviceFault(f"{name}: launch failed (injected)")


def lose(index: int) -> None:
    """The device is gone: whatever touches it raises ``DeviceFault``."""
    STATE.devices[index].lost = True


def limit_memory(free: int, index: int = 0) -> None:
    """Leave exactly ``free`` bytes on the device."""
    device = STATE.devices[index]
    device.memory = device.used + free


@contextlib.contextmanager
def slow_copies(seconds: float) -> Iterator[None]:
    """Each copy inside takes ``seconds`` longer."""
    STATE.seconds_per_copy = seconds
    try:
        yield
    finally:
        STATE.seconds_per_copy = 0.0


@contextlib.contextmanager
def wrong_numbers(hook: str, by: float = 0.05) -> Iterator[None]:
    """Floating results of ``hook`` inside are too large by the share ``by``: what a kit has to notice."""
    STATE.wrong[hook] = by
    try:
        yield
    finally:
        STATE.wrong.pop(hook, None)


def peek(tensor: torch.Tensor) -> torch.Tensor:
    """For assertions only: a copy of the payload, uncounted."""
    return tensor._raw.clone() if isinstance(tensor, SimTensor) else tensor.clone()


class Counted(Counter[str]):
    """Copies, launches and syncs inside ``counted()``; ``bytes`` by kind of copy, ``ops`` launches by operator."""

    bytes: Counter[str]
    ops: Counter[str]


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    """Yields a counter that is filled on exit."""
    before = Counter(STATE.counts), Counter(STATE.bytes), Counter(STATE.ops)
    out = Counted()
    out.bytes, out.ops = Counter(), Counter()
    try:
        yield out
    finally:
        for target, now, then in zip(
            (out, out.bytes, out.ops), (STATE.counts, STATE.bytes, STATE.ops), before, strict=True
        ):
            target.update(now - then)  # counters only grow, so what is left is what was added
