"""The one door to every kernel: on a device it is started, in a recording what would be started is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from qiao_triton.architectures import INTERPRETER, Architecture, of_index


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of ``kernel``: run-time ``arguments`` and compile-time ``constants`` by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class _Recording:
    arch: Architecture
    note: Callable[[Launch], None]


_RECORDING: ContextVar[_Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording(arch: Architecture) -> Iterator[list[Launch]]:
    """Within it nothing is started; the list gets what would be started on ``arch``."""
    found: list[Launch] = []
    token = _RECORDING.set(_Recording(arch, found.append))
    try:
        yield found
    finally:
        _RECORDING.reset(token)


def architecture_of(tensor: torch.Tensor) -> Architecture:
    """What ``tensor`` lies on; the interpreter for the host."""
    recorded = _RECORDING.get()
    if recorded is not None:
        return recorded.arch
    if tensor.device.type == "cpu":
        return INTERPRETER
    return of_index(tensor.device.index or 0)


def wide(arch: Architecture, dtype: torch.dtype) -> bool:
    """Whether products of ``dtype`` are computed in float32."""
    return dtype == torch.float32 or not arch.half or (dtype == torch.bfloat16 and not arch.bf16)


@cache
def kernel_named(name: str) -> Any:
    """``"module.kernel"`` of ``qiao_triton.kernels``. Imported when first needed, so that hooks load without Triton.

    Raises ``ModuleNotFoundError`` where Triton is not installed.
    """
    module, _, kernel = name.rpartition(".")
    return getattr(import_module(f"qiao_triton.kernels.{module}"), kernel)


def _constant(value: Any) -> Any:
    """A type of torch as Triton's own."""
    if not isinstance(value, torch.dtype):
        return value
    return getattr(import_module("triton.language"), str(value).removeprefix("torch."))


def launch(
    name: str,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    constants: Mapping[str, Any],
    warps: int = 4,
    stages: int = 1,
) -> None:
    """Start the kernel ``name`` over ``grid``, on the device of its first tensor; nothing where the grid is empty."""
    if not all(grid):
        return
    kernel, recorded = kernel_named(name), _RECORDING.get()
    constants = {key: _constant(value) for key, value in constants.items()}
    if recorded is not None:
        recorded.note(Launch(kernel, grid, dict(arguments), constants, warps, stages))
        return
    where = next(x for x in arguments.values() if isinstance(x, torch.Tensor)).device
    if where.type == "cpu":
        kernel[grid](**arguments, **constants)
        return
    with torch.cuda.device(where):
        kernel[grid](**arguments, **constants, num_warps=warps, num_stages=stages)


def power_of_two(n: int) -> int:
    """The least power of two that is no less than ``n``."""
    return 1 << max(0, n - 1).bit_length()
