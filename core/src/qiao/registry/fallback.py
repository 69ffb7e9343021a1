"""The wrapper around an operator that runs on the host, derived from the catalog, and its running totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter
from typing import Any

import torch

from qiao.contract import OpSpec
from qiao.devices import HOST
from qiao.errors import KernelError, QiaoError
from qiao.registry.manager import Function


@dataclass(slots=True)
class FallbackRecord:
    """Running totals of one operator on the host. ``seconds`` includes copies and the host's own work."""

    operator: str
    calls: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class FallbackCounters:
    """Totals by operator. One thread, the engine's, adds; any thread may take a snapshot."""

    records: dict[str, FallbackRecord] = field(default_factory=dict)

    def record(self, operator: str) -> FallbackRecord:
        """The totals of ``operator``, made on first use."""
        return self.records.setdefault(operator, FallbackRecord(operator))

    def snapshot(self) -> list[FallbackRecord]:
        """A copy of all totals."""
        return [
            FallbackRecord(r.operator, r.calls, r.bytes_to_host, r.bytes_to_device, r.seconds)
            for r in list(self.records.values())
        ]


def kernel_error(operator: str, plugin: str, device: str, error: BaseException) -> KernelError:
    """The error that a failed operator becomes; the caller chains it, so ``__cause__`` is what the kernel raised."""
    hint = (
        "the device is out of memory: lower --gpu-memory-utilization or --max-num-seqs"
        if isinstance(error, torch.OutOfMemoryError)
        else "a fault of the plugin or the device, not of the request; nothing was retried elsewhere"
    )
    return KernelError(f"{operator} of plugin {plugin} failed on {device}: {type(error).__name__}: {error} ({hint})")


def on_host(spec: OpSpec, function: Function, plugin: str, device: str, record: FallbackRecord) -> Function:
    """``function`` of the host, called with activations that lie on ``device``.

    Operands that the catalog marks ``move`` are copied to the host and such results back; everything else already lies
    there. An error is raised as ``KernelError``; nothing is retried.
    """
    moved = tuple(i for i, operand in enumerate(spec.args) if operand.place == "move")
    back = tuple(operand.place == "move" for operand in spec.results)
    returns = _returner(back, device, record)

    @wraps(function)
    def call(*args: Any) -> Any:
        start = perf_counter()
        given = list(args)
        try:
            for i in moved:
                given[i] = to_host(given[i], record)
            result = returns(function(*given))
        except QiaoError:
            raise
        except Exception as error:
            raise kernel_error(spec.name, plugin, f"{HOST} for {device}", error) from error
        record.calls += 1
        record.seconds += perf_counter() - start
        return result

    return call


def staged(record: FallbackRecord) -> Callable[[torch.Tensor], torch.Tensor]:
    """The copy of logits to the host, counted with the operator that they are staged for."""

    def stage(logits: torch.Tensor) -> torch.Tensor:
        start = perf_counter()
        result: torch.Tensor = to_host(logits, record)
        record.seconds += perf_counter() - start
        return result

    return stage


def to_host(value: Any, record: FallbackRecord) -> Any:
    """``value`` on the host; a tensor that lies elsewhere is copied and counted."""
    if not isinstance(value, torch.Tensor) or value.device.type == HOST:
        return value
    record.bytes_to_host += value.numel() * value.element_size()
    return value.to(HOST)


def _returner(back: Iterable[bool], device: str, record: FallbackRecord) -> Callable[[Any], Any]:
    flags = tuple(back)

    def to_device(value: Any, wanted: bool) -> Any:
        if not wanted or not isinstance(value, torch.Tensor) or device == HOST:
            return value
        record.bytes_to_device += value.numel() * value.element_size()
        return value.to(device)

    def returns(result: Any) -> Any:
        if not any(flags):
            return result
        if len(flags) == 1:
            return to_device(result, flags[0])
        return tuple(to_device(value, wanted) for value, wanted in zip(result, flags, strict=True))

    return returns
