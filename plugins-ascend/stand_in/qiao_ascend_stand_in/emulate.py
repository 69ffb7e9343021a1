"""Fills in what kernels of the stand-in CANN leave out.

For every operator the real code of torch_npu runs: it checks, makes the results, and launches a kernel that does
nothing. The host computes the same operator over the same memory (device memory is host memory here) and writes what it
gets into the results. An ``aten`` operator computes by torch's own CPU kernel, one of torch_npu's own by the function
of its name in ``operators``. Shapes and dtypes of both must agree. While a graph is being recorded nothing is computed:
the work is noted in the graph (``graphs``) and done at each of its executions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from qiao_ascend_stand_in import graphs
from qiao_ascend_stand_in.operators import OPERATORS

_LEFT = frozenset(
    (
        *("empty", "empty_strided", "_local_scalar_dense", "is_pinned", "_pin_memory", "set_", "resize_"),
        *("_copy_from", "_copy_from_and_resize", "record_stream", "_to_copy", "set_data"),
    )
)
"""They move or name memory and compute nothing."""

_SIZED_BY_VALUES = frozenset(
    ("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount", "repeat_interleave")
)
"""Their real kernels read the size of the result from the device; here the host makes the result."""

_RANDOM = "Generator"


def view(value: Any) -> Any:
    """``value`` with the host's view of each tensor's device memory; other values as they are."""
    if isinstance(value, torch.Tensor):
        return _of_memory(value) if value.device.type == "npu" else value
    if isinstance(value, (list, tuple)):
        return type(value)(view(one) for one in value)
    return value


def _of_memory(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    raw = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), size)
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(raw, tensor.storage_offset(), tensor.size(), tensor.stride())


def _fill(name: str, got: Any, want: Any) -> None:
    """Write ``want`` into the tensors ``got`` of the device; raises ``AssertionError`` where they do not fit."""
    if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
        same = got.shape == want.shape and got.dtype == want.dtype
        assert same, f"{name}: torch_npu makes {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
        if got.numel():
            view(got).copy_(want)
    elif isinstance(got, (list, tuple)):
        for a, b in zip(got, want, strict=True):
            _fill(name, a, b)


def _written(schema: Any) -> list[int]:
    return [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value


class _Kernel:
    """The replacement of one operator's kernel."""

    def __init__(self, operator: Any, compute: Callable[..., Any], real: Any) -> None:
        schema = operator._schema
        self._name, self._compute, self._real = schema.name, compute, real
        self._arguments = [a.name for a in schema.arguments]
        self._tensors = [i for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor"]
        self._written, self._own = _written(schema), not schema.name.startswith("aten::")

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        recorded = graphs.recording()
        host = [_on_host(view(a)) for a in args]
        named = {k: _on_host(view(v)) for k, v in kwargs.items() if k != "pin_memory"}
        sized_by_values = self._real is None or (self._name == "aten::index" and _masks(args[1]))
        if sized_by_values and recorded:
            raise RuntimeError(f"{self._name} reads the size of its result from the device: not while recording")
        if sized_by_values:
            return _to_device(self._compute(*host, **named))
        changed = [] if self._own else self._changed(args, kwargs)
        if recorded or self._own:
            got = self._real.call_boxed(keyset, *(args if self._own else self._boxed(args)), **kwargs)
            # views own nothing: what a region no longer holds is used again inside it, as on the device
            made = view(kwargs["out"] if self._own and "out" in kwargs else got)
            there = (made, host, named, [(place, view(tensor)) for place, tensor in changed])
            if not (recorded and graphs.add(partial(self._work, *there))):
                self._work(*there)
            return got
        want, copies = self._computed(host, named, changed)
        got = self._real.call_boxed(keyset, *self._boxed(args), **kwargs)
        self._filled(got, want, changed, copies)
        return got

    def _changed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int | str, torch.Tensor]]:
        """(place among the arguments, tensor) of those that an operator of torch writes to."""
        found: list[tuple[int | str, torch.Tensor]] = []
        for i in self._written:
            name = self._arguments[i]
            original = args[i] if i < len(args) else kwargs.get(name)
            if isinstance(original, torch.Tensor):
                found.append((i if i < len(args) else name, original))
        return found

    def _work(self, got: Any, host: list[Any], named: dict[str, Any], changed: list[Any]) -> None:
        want, copies = self._computed(host, named, changed)
        self._filled(got, want, changed, copies)

    def _computed(self, host: list[Any], named: dict[str, Any], changed: list[Any]) -> tuple[Any, list[torch.Tensor]]:
        """What the host gets, and copies of the changed tensors with their new values."""
        host, named, copies = list(host), dict(named), []
        for place, _ in changed:
            where: Any = host if isinstance(place, int) else named
            where[place] = where[place].clone()
            copies.append(where[place])
        return self._compute(*host, **named), copies

    def _filled(self, got: Any, want: Any, changed: list[Any], copies: list[torch.Tensor]) -> None:
        for (_, original), made in zip(changed, copies, strict=True):
            _fill(self._name, original, made)
        if not changed and want is not None and (self._own or not self._written):
            _fill(self._name, got, want)

    def _boxed(self, args: tuple[Any, ...]) -> list[Any]:
        """``args`` with numbers that torch took out of their tensors put back into some."""
        made = list(args)
        for i in self._tensors:
            if i < len(made) and isinstance(made[i], (bool, int, float)):
                made[i] = torch.tensor(made[i])
        return made


def _masks(indices: Any) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices)


def _to_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        made = torch.empty(value.size(), dtype=value.dtype, device="npu")
        _fill("", made, value)
        return made
    return type(value)(_to_device(one) for one in value)


def _computable(operator: Any) -> bool:
    schema = operator._schema
    name = schema.name.partition("::")[2]
    random = any(_RANDOM in str(a.type) for a in schema.arguments)
    return not (operator.is_view or name in _LEFT or random or name.startswith(("_foreach", "_fused", "_cudnn")))


def _overloads() -> Iterator[Any]:
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if space in ("aten", "npu", "atb"):
            packet = getattr(getattr(torch.ops, space), name, None)
            if packet is not None and (overload or "default") in packet.overloads():
                yield getattr(packet, overload or "default")


def install() -> None:
    """Replace torch_npu's kernels, once a process."""
    libraries = {space: torch.library.Library(space, "IMPL") for space in ("aten", "npu", "atb")}
    for operator in list(_overloads()):
        space, _, name = operator._schema.name.partition("::")
        own = OPERATORS.get(operator._schema.name)
        if own is None and (space != "aten" or not _computable(operator)):
            continue
        real = None if name in _SIZED_BY_VALUES else torch.library.get_kernel(operator, "PrivateUse1")
        overload = operator._schema.overload_name
        kernel = _Kernel(operator, own or operator, real)
        full = f"{name}.{overload}" if overload else name
        libraries[space].impl(full, kernel, "PrivateUse1", with_keyset=True, allow_override=True)
    _KEPT.extend(libraries.values())


_KEPT: list[torch.library.Library] = []
"""A library takes its kernels with it when it goes."""
