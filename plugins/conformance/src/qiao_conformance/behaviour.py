"""What hooks owe beside right numbers: names and types, repeatable results, nothing kept, a known end of memory."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from qiao.contract import CATALOG, SPECS, MemoryInfo
from qiao.contract.cases import Case, LooseCache

from qiao_conformance.target import Target, flat_rows, host, same

TOO_MUCH = 4
"""Times a device's whole memory: what cannot fit whatever is free."""


def check_names_and_types(target: Target, hook: str) -> None:
    """Arguments are the contract's, none has a default, and where the plugin writes types they are the contract's.

    Raises ``AssertionError``.
    """
    function, spec = inspect.unwrap(target.hooks[hook]), specification(hook)
    known = list(inspect.signature(spec).parameters)[1:]
    parameters = inspect.signature(function).parameters
    unknown = [name for name in parameters if name not in known]
    assert not unknown, f"{hook} has the arguments {unknown}, the contract has {known}"
    defaults = [n for n, p in parameters.items() if p.default is not inspect.Parameter.empty]
    assert not defaults, f"{hook}: {defaults} must not have a default, the core always passes them"
    wanted, given = _hints(spec), _hints(function)
    for name, kind in given.items():
        want = wanted.get(name, Any)
        fits = _fits(kind, want) if name == "return" else _fits(want, kind)
        assert fits, f"{hook}: {name} is annotated {kind}, the contract says {want}"


def specification(hook: str) -> Callable[..., Any]:
    """The contract's function for ``hook``."""
    found: Callable[..., Any] = next(vars(spec)[hook] for spec in SPECS if hook in vars(spec))
    return found


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:  # names that are there for a type checker only cannot be judged
        return {}


def _fits(narrow: Any, wide: Any) -> bool:
    """Whether a ``narrow`` may stand where a ``wide`` is said; what cannot be told apart here fits."""
    if narrow == wide or Any in (narrow, wide) or wide is object:
        return True
    plain = inspect.isclass(narrow) and inspect.isclass(wide)
    if plain and not typing.get_args(narrow) and not typing.get_args(wide):
        return issubclass(narrow, wide)
    origins = [typing.get_origin(x) or x for x in (narrow, wide)]
    if all(inspect.isclass(x) for x in origins):
        return issubclass(*origins)
    return False


def check_repeatable(target: Target, case: Case, other: Case) -> None:
    """Equal arguments give equal bits, and a call in between with those of ``other`` changes neither result.

    Raises ``AssertionError``.
    """
    first = _call(target, case)
    noted = host(first)
    _call(target, other)
    assert same(noted, host(first)), f"{case.id}: a later call changed the result of an earlier one"
    again = host(_call(target, case))
    assert same(noted, again), f"{case.id}: the same arguments gave other bits the second time"


def _call(target: Target, case: Case) -> Any:
    """The results, with what is in each cache that may change at the slots that the case has written."""
    arguments = target.placed(case)
    found = _plain(target.call(case.hook, arguments))
    for name in CATALOG[case.hook].mutates:
        cache, loose = arguments[name], case.arguments[name]
        if isinstance(loose, LooseCache) and cache.layout in ("NHD", "HND"):
            found = (*found, *(rows[loose.slots] for rows in flat_rows(cache)))
    return found


def _plain(result: Any) -> tuple[Any, ...]:
    """The tensors of a result: of a tuple, of a record, or its own."""
    if result is None:
        return ()
    if hasattr(result, "__dataclass_fields__"):
        return tuple(getattr(result, name) for name in result.__dataclass_fields__)
    return result if isinstance(result, tuple) else (result,)


def check_out_of_memory(target: Target) -> None:
    """A cache that cannot fit raises ``torch.OutOfMemoryError``, and the device works as before.

    Raises ``AssertionError`` where it is another error or none, or where memory stays taken.
    """
    device, facts = target.device.torch_device, target.capabilities
    before: MemoryInfo = target.hooks["memory_info"](device)
    block, dim = (facts.block_sizes or (16,))[0], (facts.head_dims or (64,))[0]
    dtype = getattr(torch, (facts.kv_dtypes or facts.dtypes)[0])
    row = 2 * block * dim * dtype.itemsize
    shape = (block, 1, dim, dtype, facts.kv_layouts[0], device)
    try:
        target.hooks["allocate_kv"](TOO_MUCH * before.total // row + 1, *shape)
    except torch.OutOfMemoryError:
        pass
    except Exception as error:
        raise AssertionError(
            f"allocate_kv raised {type(error).__name__} for {TOO_MUCH} times the device's memory; the contract asks "
            f"for torch.OutOfMemoryError: {error}"
        ) from error
    else:
        raise AssertionError(f"allocate_kv gave a cache of {TOO_MUCH} times the device's memory")
    cache = target.hooks["allocate_kv"](2, *shape)
    assert cache is not None
    target.hooks["synchronize"](device)
    if device != "cpu":  # others use the host's memory meanwhile
        after: MemoryInfo = target.hooks["memory_info"](device)
        assert after.free >= before.free - before.total // 100, "memory is still taken after allocate_kv failed"


def check_device_hooks(target: Target) -> None:
    """Without these four nothing can start. Raises ``AssertionError``."""
    for hook in ("probe_devices", "capabilities", "memory_info", "synchronize"):
        assert hook in target.hooks, f"{hook} is required"
    memory = target.hooks["memory_info"](target.device.torch_device)
    assert isinstance(memory, MemoryInfo), f"memory_info returned a {type(memory).__name__}"
    assert 0 <= memory.free <= memory.total
    if "utilization" in target.hooks:
        busy = target.hooks["utilization"](target.device.torch_device)
        assert 0.0 <= busy <= 1.0, f"utilization is a share from 0 to 1, got {busy}"
    if "collective_backend" in target.hooks:
        name = target.hooks["collective_backend"]()
        assert isinstance(name, str) and name, f"collective_backend names a backend of torch.distributed, got {name!r}"


def check_threads(target: Target) -> None:
    """A plugin that has the hook says what it uses by default, and refuses a number that is none."""
    assert target.hooks["set_threads"](None).strip()
    with pytest.raises(ValueError, match=r"."):
        target.hooks["set_threads"](0)
