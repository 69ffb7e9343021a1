"""MLU graphs of the stand-in: the operations of a region are noted with their arguments and done again at a replay.

What a real capture refuses is refused here: reading a value on the host, and copies between host and device. Numbers
on the host, such as a longest context, stay what they were while recording, as on the real device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from qiao_conformance.sim.device import SimTensor
from qiao_conformance.sim.state import STATE
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_HOST = ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero", "aten::nonzero")
_COPIES = ("aten::_to_copy", "aten::copy_")


class CaptureError(RuntimeError):
    """What is not permitted while a stream is capturing."""


def _tensors(value: Any) -> list[SimTensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, SimTensor)]


def _storages(value: Any) -> set[int]:
    return {t._raw.untyped_storage()._cdata for t in _tensors(value)}


class MLUGraph:
    """What was done in a region."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[SimTensor]]] = []

    def add(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """One more operation; a view of an argument needs no work at a replay."""
        known = _storages((args, kwargs))
        fresh = [t for t in _tensors(result) if t._raw.untyped_storage()._cdata not in known]
        changes = not _tensors(result) or not fresh
        views = changes and bool(_tensors(result)) and not getattr(function, "_schema", _InPlace).is_mutable
        if not views:
            self._steps.append((function, args, kwargs, fresh))

    def replay(self) -> None:
        """Do it again, on the same memory."""
        STATE.launched("hook.replay")
        STATE.local.replaying = True
        try:
            for function, args, kwargs, results in self._steps:
                found = _tensors(function(*args, **kwargs))
                known = _storages((args, kwargs))
                fresh = [t for t in found if t._raw.untyped_storage()._cdata not in known]
                for old, new in zip(results, fresh, strict=True):
                    old._raw.copy_(new._raw)
        finally:
            STATE.local.replaying = False


class _InPlace:
    is_mutable = True


class _Recorder(TorchDispatchMode):
    def __init__(self, target: MLUGraph) -> None:
        super().__init__()
        self.target = target

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        ours = bool(_tensors((args, kwargs)))
        if ours and name in _HOST:
            raise CaptureError(f"operation not permitted when stream is capturing: {name}")
        result = func(*args, **kwargs)
        mixed = ours != bool(_tensors(result)) or _hosts(args)
        if name in _COPIES and (ours or _tensors(result)) and mixed:
            raise CaptureError(f"operation not permitted when stream is capturing: {name} between host and device")
        if ours or _tensors(result):
            self.target.add(func, args, kwargs, result)
        return result


def _hosts(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.Tensor) and not isinstance(a, SimTensor) for a in args)


_RECORDING: list[MLUGraph] = []


@contextmanager
def graph(target: MLUGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """Note in ``target`` what is done inside."""
    _RECORDING.append(target)
    try:
        with _Recorder(target):
            yield
    finally:
        _RECORDING.pop()


def operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of torch_mlu_ops: noted whole where a graph is being recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _RECORDING:
            return function(*args, **kwargs)
        with _disable_current_modes():
            result = function(*args, **kwargs)
        _RECORDING[-1].add(function, args, kwargs, result)
        return result

    call.__name__, call.__doc__, call.__wrapped__ = function.__name__, function.__doc__, function
    return call
