"""Capture on the CPU: a function over fixed buffers becomes a native program that runs again without Python.

While the function runs once, kernels called through ``qiao_cpu.native`` add themselves to the program. Around them a
dispatch mode sees each ATen operator: views pass, since a replay works on the same memory; new tensors come from the
program's own memory; the few light operators that models use outside the OpTable are done by native kernels; and any
other is refused by name, since torch would do it now and never again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_long
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch
from qiao.contract import hookimpl
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from qiao_cpu import native
from qiao_cpu.memory import Memory, memory_for

aten = torch.ops.aten

_ADD, _SUBTRACT, _MULTIPLY = range(3)
"""``enum Operation`` of elements.h."""


@hookimpl
def capture(function: Callable[..., Any], example: tuple[Any, ...], device: str) -> Callable[[], Any]:
    """See ``DeviceSpec.capture``. Programs over the same buffers share their memory, results included."""
    inputs = [x for x in pytree.tree_leaves(example) if isinstance(x, torch.Tensor)]
    memory = memory_for(inputs)
    program = native.Program()
    with torch.no_grad(), program, _Recorder(memory):
        result = function(*example)
    memory.finish(x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor))
    return _Replay(program, result, (function, example, memory))


class _Replay:
    """What ``capture`` returns. ``kept`` are the owners of the memory that the program uses."""

    def __init__(self, program: native.Program, result: Any, kept: tuple[Any, ...]) -> None:
        self.program = program
        self._result = result
        self._kept = kept

    @property
    def nbytes(self) -> int:
        """What the program holds beside memory that it shares with others over the same buffers."""
        return self.program.nbytes

    def __call__(self) -> Any:
        self.program.replay()
        return self._result


class _Recorder(TorchDispatchMode):
    """Sees the ATen operators of a region; see the module."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler to keep it away from the next method: 60 MiB and a second, for nothing."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self.memory, *args, **kwargs)
        with self:  # under inference_mode composite operators arrive whole
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if _is_view(func):
            return func(*args, **kwargs)
        raise refused(func, "")


def refused(func: Any, why: str) -> NotImplementedError:
    """What says that a region with ``func`` in it is not captured."""
    name = f"{func.namespace}.{func._schema.name.split('::')[1]}"
    return NotImplementedError(f"{name}{why} has no native kernel, so what calls it is not captured")


def _is_view(func: Any) -> bool:
    """Whether all results share memory with arguments that are not changed."""
    if func is aten._unsafe_view.default:  # of a copy that nobody else sees, so it is not declared as one
        return True
    returns = func._schema.returns
    shared = all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return bool(returns) and shared and func is not aten.lift_fresh.default


def _floating(func: Any, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in native.TYPES:
            raise refused(func, f" of {str(tensor.dtype).removeprefix('torch.')}")


def _empty(
    memory: Memory,
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    layout: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    if device is not None and torch.device(device).type != "cpu":
        raise refused(aten.empty.memory_format, f" on {device}")
    return memory.empty(size, dtype or torch.get_default_dtype())


def _empty_strided(memory: Memory, size: Any, stride: Any, **options: Any) -> torch.Tensor:
    made = _empty(memory, size, **options)
    if tuple(made.stride()) != tuple(stride):
        raise refused(aten.empty_strided.default, " with gaps or turned dimensions")
    return made


def _empty_like(memory: Memory, x: torch.Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    return _empty(memory, x.shape, dtype=dtype or x.dtype, **options)


def _new_empty(
    memory: Memory, x: torch.Tensor, size: Any, *, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    return _empty(memory, size, dtype=dtype or x.dtype, **options)


def _zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def zeros(memory: Memory, *args: Any, **options: Any) -> torch.Tensor:
        made = make(memory, *args, **options)
        native.check(native.zero(made.data_ptr(), made.nbytes))
        return made

    return zeros


def _joint(shape: Sequence[int], *tensors: torch.Tensor) -> list[tuple[int, ...]]:
    """(size, stride in each tensor) of the common dimensions, neighbours joined where all are evenly spaced."""
    joint: list[tuple[int, ...]] = []
    for size, *strides in zip(shape, *(x.stride() for x in tensors), strict=True):
        if size == 1:
            continue
        if joint and all(outer == size * inner for outer, inner in zip(joint[-1][1:], strides, strict=True)):
            joint[-1] = (joint[-1][0] * size, *strides)
        else:
            joint.append((size, *strides))
    return joint


def _copy(memory: Memory, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``target.copy_(source)``."""
    func = aten.copy_.default
    if target.dtype != source.dtype:
        raise refused(func, f" from {source.dtype} to {target.dtype}")
    if not target.numel():
        return target
    outer, inner = _joint(target.shape, source.expand(target.shape), target), 1
    if outer and outer[-1][1:] == (1, 1):
        inner = outer.pop()[0]
    if len(outer) > 2:
        raise refused(func, f" with strides {tuple(source.stride())} to {tuple(target.stride())}")
    item = target.element_size()
    (a, from_a, to_a), (b, from_b, to_b) = [(1, 0, 0)] * (2 - len(outer)) + outer
    strides = source.data_ptr(), from_a * item, from_b * item, target.data_ptr(), to_a * item, to_b * item
    native.check(native.copy(native.Copy(*strides, a, b, inner * item)))
    return target


def _clone(memory: Memory, x: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
    return _copy(memory, memory.empty(x.shape, x.dtype), x)


def _cat(memory: Memory, tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    first = tensors[0]
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    out, at = memory.empty(shape, first.dtype), 0
    for x in tensors:
        _copy(memory, out.narrow(dim, at, x.shape[dim]), x)
        at += x.shape[dim]
    return out


def _rows(memory: Memory, x: torch.Tensor) -> tuple[tuple[int, int, int], int, int]:
    """``x`` as the kernels see rows: ((pointer, stride, type), rows, size); a copy where it is none."""
    if (
        x.dim() < 2
        or x.stride(-1) != 1
        or any(x.stride(i) != x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))
    ):
        x = x if x.is_contiguous() else _clone(memory, x)
        rows, size = (1, x.numel()) if x.dim() < 2 else (x.numel() // x.shape[-1], x.shape[-1])
        return (x.data_ptr(), size, native.TYPES[x.dtype]), rows, size
    return (x.data_ptr(), x.stride(-2), native.TYPES[x.dtype]), math.prod(x.shape[:-1]), x.shape[-1]


def _to_copy(
    memory: Memory,
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **options: Any,
) -> torch.Tensor:
    func = aten._to_copy.default
    if device is not None and torch.device(device).type != "cpu":
        raise refused(func, f" to {device}")
    if dtype is None or dtype == x.dtype:
        return _clone(memory, x)
    out = memory.empty(x.shape, dtype)
    if x.dtype in (torch.int8, torch.uint8) and dtype == torch.float32:
        x = x if x.is_contiguous() else _clone(memory, x)
        native.check(native.widen_bytes(x.data_ptr(), x.dtype == torch.int8, out.data_ptr(), x.numel()))
        return out
    _floating(func, x, out)
    source, rows, size = _rows(memory, x)
    native.check(native.convert(*source, *_rows(memory, out)[0], rows, size))
    return out


def _common(one: torch.Size, other: torch.Size) -> torch.Size:
    """The shape that both are repeated to. ``torch.broadcast_shapes`` would import 25 MiB of symbolic algebra."""
    return torch.Size(
        max(pair) if min(pair) else 0 for pair in reversed([*zip_longest(reversed(one), reversed(other), fillvalue=1)])
    )


def _combined(memory: Memory, func: Any, operation: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Element by element in float32, one of them repeated where it has one for several of the other."""
    if x.dtype != torch.float32 or y.dtype != torch.float32:
        raise refused(func, f" of {x.dtype} and {y.dtype}")
    out = memory.empty(_common(x.shape, y.shape), torch.float32)
    if not out.numel():
        return out
    joint = _joint(out.shape, x.expand(out.shape), y.expand(out.shape), out)
    if len(joint) > 3:
        raise refused(func, " with these strides")
    sizes, x_strides, y_strides, _ = zip(*([(1, 0, 0, 0)] * (3 - len(joint)) + joint), strict=True)
    vectors = [(c_long * 3)(*v) for v in (sizes, x_strides, y_strides)]
    args = native.Combine(operation, x.data_ptr(), y.data_ptr(), out.data_ptr(), *vectors)
    native.check(native.combine(args))
    return out


def _mul(memory: Memory, x: torch.Tensor, y: Any) -> torch.Tensor:
    """By a number: ``float`` of the element times ``float`` of the number, rounded once, as torch does it."""
    func = aten.mul.Tensor
    if isinstance(y, torch.Tensor):
        return _combined(memory, func, _MULTIPLY, x, y)
    _floating(func, x)
    if isinstance(y, complex):
        raise refused(func, " by a complex number")
    out = memory.empty(x.shape, x.dtype)
    source, rows, size = _rows(memory, x)
    native.check(native.scale(*source, float(y), *_rows(memory, out)[0], rows, size))
    return out


def _add(memory: Memory, x: torch.Tensor, y: Any, *, alpha: Any = 1) -> torch.Tensor:
    func = aten.add.Tensor
    if not isinstance(y, torch.Tensor) or alpha != 1:
        raise refused(func, " of anything but two tensors")
    if x.shape != y.shape:
        return _combined(memory, func, _ADD, x, y)
    _floating(func, x, y)
    out = memory.empty(x.shape, torch.promote_types(x.dtype, y.dtype))
    first, rows, size = _rows(memory, x)
    native.check(native.add(*first, *_rows(memory, y)[0], *_rows(memory, out)[0], rows, size))
    return out


def _sub(memory: Memory, x: torch.Tensor, y: Any, *, alpha: Any = 1) -> torch.Tensor:
    func = aten.sub.Tensor
    if not isinstance(y, torch.Tensor) or alpha != 1:
        raise refused(func, " of anything but two tensors")
    return _combined(memory, func, _SUBTRACT, x, y)


def _gather(memory: Memory, func: Any, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of ``table`` [V, E], which must be in one piece each."""
    if table.dim() != 2 or ids.dim() != 1 or ids.dtype != torch.int64 or table.stride(1) != 1:
        raise refused(func, " of anything but whole rows by int64 ids")
    out = memory.empty((ids.shape[0], table.shape[1]), table.dtype)
    ids = ids if ids.is_contiguous() else _clone(memory, ids)
    item = table.element_size()
    where = table.data_ptr(), table.shape[0], table.stride(0) * item, table.shape[1] * item
    native.check(native.gather_rows(*where, ids.data_ptr(), out.data_ptr(), ids.shape[0]))
    return out


def _embedding(memory: Memory, weight: torch.Tensor, ids: torch.Tensor, *options: Any) -> torch.Tensor:
    return _gather(memory, aten.embedding.default, weight, ids)


def _index_select(memory: Memory, x: torch.Tensor, dim: int, ids: torch.Tensor) -> torch.Tensor:
    func = aten.index_select.default
    if dim % x.dim() == 0:
        return _gather(memory, func, x, ids)
    if x.dim() != 2 or x.stride(1) != 1 or ids.dtype != torch.int64 or not ids.is_contiguous():
        raise refused(func, f" of dimension {dim}")
    out, item = memory.empty((x.shape[0], ids.shape[0]), x.dtype), x.element_size()
    source = x.data_ptr(), x.stride(0) * item, x.shape[1]
    native.check(native.gather_columns(*source, ids.data_ptr(), ids.shape[0], out.data_ptr(), x.shape[0], item))
    return out


_HANDLERS: Mapping[Any, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        aten.empty.memory_format: _empty,
        aten.empty_strided.default: _empty_strided,
        aten.empty_like.default: _empty_like,
        aten.new_empty.default: _new_empty,
        aten.zeros.default: _zeroed(_empty),
        aten.zeros_like.default: _zeroed(_empty_like),
        aten.new_zeros.default: _zeroed(_new_empty),
        aten.copy_.default: _copy,
        aten.clone.default: _clone,
        aten.cat.default: _cat,
        aten._to_copy.default: _to_copy,
        aten.mul.Tensor: _mul,
        aten.add.Tensor: _add,
        aten.sub.Tensor: _sub,
        aten.embedding.default: _embedding,
        aten.index_select.default: _index_select,
    }
)
