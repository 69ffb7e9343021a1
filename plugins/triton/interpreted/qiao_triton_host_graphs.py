"""CUDA graphs by torch's documented rules, on the host: what a stream would record is noted and replayed in order.

So that ``qiao_triton.graphs`` runs without a device. Kernels are noted at their door, torch's operators by a dispatch
mode. Held to: a warm-up on a side stream that waits for the current one and is waited for; no value read on the host
and no wait while a stream records. Nothing is said about what a driver or an allocator does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from qiao_triton import launch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

Step = Callable[[], None]

_REFUSED = "CUDA error: operation not permitted when stream is capturing"
_READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select")


def _storages(value: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tree_leaves(value) if isinstance(x, torch.Tensor)}


def _again(function: Any, args: Any, kwargs: Any, first: Any) -> Step:
    """Runs an operator anew; results that are not views of an argument go where they were at first."""
    given = _storages((args, kwargs))

    def step() -> None:
        found = function(*args, **kwargs)
        for old, new in zip(tree_leaves(first), tree_leaves(found), strict=True):
            if isinstance(old, torch.Tensor) and not _storages(old) & given:
                old.copy_(new)

    return step


class _Noting(TorchDispatchMode):
    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in _READS:
            raise RuntimeError(_REFUSED)
        found = function(*args, **(kwargs or {}))
        self._steps.append(_again(function, args, kwargs or {}, found))
        return found


class _Kernel:
    """A kernel whose starts are noted while a stream records."""

    def __init__(self, kernel: Any, driver: Driver) -> None:
        self._kernel, self._driver = kernel, driver

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(**arguments: Any) -> None:
            def step() -> None:
                with _disable_current_modes():
                    self._kernel[grid](**arguments)

            step()
            if self._driver.recording is not None:
                self._driver.recording.append(step)

        return start


class Stream:
    """Of ``torch.cuda``; ``waits`` are the streams that it waits for."""

    def __init__(self) -> None:
        self.waits: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        """Noted."""
        self.waits.append(other)


class Graph:
    """``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def replay(self) -> None:
        """All steps in their order."""
        assert self.steps, "replay of a graph that recorded nothing"
        for step in self.steps:
            step()


class Driver:
    """What ``torch.cuda`` has of streams and graphs; ``recording`` has the steps while a stream records."""

    def __init__(self) -> None:
        self.recording: list[Step] | None = None
        self.current = self.default = Stream()
        self.pools: list[tuple[int, int]] = []
        self.sides: list[Stream] = []

    def synchronize(self, device: Any = None) -> None:
        """Raises while a stream records."""
        if self.recording is not None:
            raise RuntimeError(_REFUSED)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Makes ``stream`` the current one."""
        assert self.current in stream.waits, "a side stream has to wait for what is before it"
        self.sides.append(stream)
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> tuple[int, int]:
        """Another one each time."""
        self.pools.append((0, len(self.pools) + 1))
        return self.pools[-1]

    @contextmanager
    def graph(self, graph: Graph, pool: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        """Records what is within."""
        assert self.recording is None and pool in self.pools
        assert set(self.sides[-1:]) <= set(self.current.waits), "what ran on the side stream has to be waited for"
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        self.recording = graph.steps
        try:
            with _Noting(graph.steps):
                yield
        finally:
            self.recording = None

    @contextmanager
    def there(self) -> Iterator[None]:
        """Within it ``torch.cuda`` has this for streams and graphs, and kernels are noted."""
        real = launch.kernel_named
        names = {"Stream": Stream, "CUDAGraph": Graph, "stream": self.stream, "graph": self.graph}
        names |= {"device": nullcontext, "graph_pool_handle": self.graph_pool_handle, "synchronize": self.synchronize}
        with (
            mock.patch.multiple(torch.cuda, current_stream=lambda: self.current, **names),
            mock.patch.object(launch, "kernel_named", lambda name: _Kernel(real(name), self)),
        ):
            yield
