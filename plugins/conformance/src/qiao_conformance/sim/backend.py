"""What torch needs to know of a backend: factories, and the module that becomes ``torch.sim``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qiao_conformance.sim.device import SimTensor, copy_
from qiao_conformance.sim.state import NAME, STATE, Block

aten = torch.ops.aten

_FACTORIES = """
    empty_strided arange arange.start arange.start_step full eye eye.m linspace rand rand.generator randn
    randn.generator randint randint.low randint.generator randint.low_generator randperm randperm.generator
    scalar_tensor ones zeros tril_indices triu_indices
"""


def _factory(operator: Any) -> Callable[..., torch.Tensor]:
    def make(
        *args: Any,
        device: Any = None,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        pin_memory: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        index = STATE.index_of(device)
        options = {k: v for k, v in options.items() if v is not None}
        return SimTensor(operator(*args, dtype=dtype, device="cpu", **options), index)

    return make


def _empty(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    index = STATE.index_of(device)
    dtype = dtype or torch.get_default_dtype()
    Block(STATE.devices[index], torch.Size(size).numel() * dtype.itemsize)  # fail before the host allocates
    raw = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    if raw.is_floating_point() and dtype.itemsize > 1:
        raw.fill_(float("nan"))  # unread garbage shows
    return SimTensor(raw, index)


class Stream:
    """Work is done at once, so a stream only remembers its device."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device(NAME, STATE.index_of(device))

    def synchronize(self) -> None:
        """Wait; late faults raise."""
        STATE.synchronize(self.device.index)

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that is already complete."""
        return event or Event()

    def query(self) -> bool:
        """Always complete."""
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class Event:
    """Always complete."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.device_index = STATE.current()

    def record(self, stream: Stream | None = None) -> None:
        """Remember the stream's device."""
        self.device_index = stream.device.index if stream else STATE.current()

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Wait; late faults raise."""
        STATE.synchronize(self.device_index)

    def query(self) -> bool:
        """Always complete."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """No time passes on a device that does not exist."""
        return 0.0


class Module:
    """Becomes ``torch.sim``, with the names that torch and vendors' modules share."""

    Stream = Stream
    Event = Event
    OutOfMemoryError = torch.OutOfMemoryError

    def is_available(self) -> bool:
        """Whether there is a device."""
        return bool(STATE.devices)

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Number of devices."""
        return len(STATE.devices)

    def current_device(self) -> int:
        """This thread's current device."""
        return STATE.current()

    def set_device(self, device: Any) -> None:
        """Choose this thread's current device."""
        STATE.local.index = STATE.index_of(device)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Choose the current device for a while."""
        old = STATE.current()
        self.set_device(device)
        try:
            yield
        finally:
            STATE.local.index = old

    def synchronize(self, device: Any = None) -> None:
        """Wait; late faults raise."""
        STATE.synchronize(STATE.index_of(device))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes."""
        found = STATE.alive(STATE.index_of(device))
        return found.memory - found.used, found.memory

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes in use."""
        return STATE.devices[STATE.index_of(device)].used

    def max_memory_allocated(self, device: Any = None) -> int:
        """Most bytes in use since the last reset."""
        return STATE.devices[STATE.index_of(device)].peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Start the peak over."""
        found = STATE.devices[STATE.index_of(device)]
        found.peak = found.used

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def manual_seed_all(self, seed: int) -> None:
        """Random factories use the host's generator."""

    manual_seed = manual_seed_all

    def current_stream(self, device: Any = None) -> object:
        """The only stream."""
        return Stream(device)

    def stream(self, stream: Any) -> Any:
        """A context that does nothing."""
        return stream

    def get_device_name(self, device: Any = None) -> str:
        """For reports."""
        return "Simulated accelerator"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """For autocast."""
        return [torch.float16, torch.bfloat16]


def registered() -> bool:
    """Whether this process already has the device."""
    return STATE.library is not None


def register() -> None:
    """Take torch's only slot for a backend from outside. Once a process; raises ``RuntimeError`` where it is taken."""
    if registered():
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    for name in _FACTORIES.split():
        base, _, overload = name.partition(".")
        library.impl(name, _factory(getattr(getattr(aten, base), overload or "default")), "PrivateUse1")
    library.impl("_copy_from", lambda source, target, non_blocking=False: copy_(target, source), "PrivateUse1")
    STATE.library = library
