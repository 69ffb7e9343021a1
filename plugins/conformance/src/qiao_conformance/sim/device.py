"""The simulated accelerator's tensor.

A ``SimTensor`` has no memory that CPU code could read; the payload is a private CPU tensor, and every ATen call on it
passes through ``__torch_dispatch__`` here, where it is counted, checked and, when a test asks for it, made to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from qiao_conformance.sim.state import NAME, STATE, Block

aten = torch.ops.aten


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in text.split())


_VIEWS = _names(
    """view _unsafe_view as_strided detach alias t transpose permute expand slice select squeeze unsqueeze split
    split_with_sizes unbind narrow unfold reshape lift_fresh chunk _reshape_alias movedim flatten diagonal"""
)
_TAKES_HOST_INDICES = _names("copy_ _to_copy index index_put_ index_put _index_put_impl_")
_RESHAPES_SELF = _names("resize_ set_ t_ transpose_ squeeze_ unsqueeze_ as_strided_ resize_as_")
_ANSWERS_THE_HOST = _names("equal is_nonzero nonzero")


class SimTensor(torch.Tensor):
    """A tensor on ``sim:index``; ``_raw`` is the payload, ``_block`` the allocation that it lies in."""

    _raw: torch.Tensor
    _block: Block

    @staticmethod
    def __new__(cls: type[SimTensor], raw: torch.Tensor, index: int, block: Block | None = None) -> SimTensor:
        """Put ``raw`` on device ``index``: in ``block`` if it is a view, else in an allocation of its own."""
        STATE.check_dtype(raw.dtype)
        block = block or Block(STATE.devices[index], raw.untyped_storage().nbytes())
        tensor: SimTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, index),
        )
        tensor._raw, tensor._block = raw, block
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SimTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise BufferError(f"{NAME} memory cannot be exported")

    def numpy(self, *, force: bool = False) -> Any:
        """Only with ``force``, which copies to the host first."""
        if force:
            return self.cpu().numpy()
        raise TypeError(f"can't convert {self.device} tensor to numpy; copy it to the host first")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        """A counted copy to the host."""
        return self.cpu().tolist()

    def __reduce_ex__(self, proto: Any) -> Any:
        raise NotImplementedError(f"{NAME} tensors cannot be pickled; copy to the host first")

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Under inference_mode composite operators arrive whole; taken apart, the same work is seen in both modes."""
        kwargs = kwargs or {}
        result = func.decompose(*args, **kwargs)
        return _dispatch(func, args, kwargs) if result is NotImplemented else result


def wrap(raw: torch.Tensor, index: int, block: Block | None = None) -> SimTensor:
    """``raw`` as a device tensor; a view of a normal tensor stays a normal tensor under inference_mode."""
    with torch.inference_mode(raw.is_inference()):
        return SimTensor(raw, index, block)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = f"{func.namespace}.{func._schema.name.split('::')[1]}"
    special = _SPECIAL.get(name)
    if special is not None:
        return special(*args, **kwargs)
    if name in _RESHAPES_SELF:
        raise NotImplementedError(f"{name} on {NAME}")
    flat, spec = pytree.tree_flatten((args, kwargs))
    sims = [a for a in flat if isinstance(a, SimTensor)]
    index = sims[0].device.index if sims else STATE.current()
    if name in _ANSWERS_THE_HOST:
        STATE.synchronize(index)
        STATE.counts["d2h"] += 1
    if name not in _VIEWS:
        _check_operands(name, index, flat, sims)
        STATE.fire(name, index)
        STATE.launched(name)
    raw_args, raw_kwargs = pytree.tree_unflatten([_lowered(a) for a in flat], spec)
    return _lifted(func(*raw_args, **raw_kwargs), sims, index)


def _check_operands(name: str, index: int, flat: list[Any], sims: list[SimTensor]) -> None:
    if name in STATE.missing_ops or (STATE.only_ops is not None and name not in STATE.only_ops):
        raise NotImplementedError(f"Could not run '{name}' on the '{NAME}' backend")
    if any(a.device.index != index for a in sims):
        found = ", ".join(sorted({str(a.device) for a in sims}))
        raise RuntimeError(f"Expected all tensors to be on the same device, found {found}")
    # a host tensor without dimensions is a number, which any backend takes
    hosts = [a for a in flat if isinstance(a, torch.Tensor) and not isinstance(a, SimTensor) and a.dim() > 0]
    if hosts and name not in _TAKES_HOST_INDICES:
        found = f"{NAME}:{index} and {hosts[0].device}"
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found}! (in {name})")
    for host in hosts:
        STATE.moved("h2d", host)


def _lowered(value: Any) -> Any:
    if isinstance(value, SimTensor):
        return value._raw
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _lifted(result: Any, sims: list[SimTensor], index: int) -> Any:
    """Results as device tensors: the operand itself where it was changed in place, its block where it is a view."""
    operands = {id(a._raw): a for a in sims}
    blocks = {a._raw.untyped_storage()._cdata: a._block for a in sims}

    def lift(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in operands:
            return operands[id(value)]
        return wrap(value, index, blocks.get(value.untyped_storage()._cdata))

    return pytree.tree_map(lift, result)


def _to_copy(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    target = torch.device(device) if device is not None else x.device
    options = {} if memory_format is None else {"memory_format": memory_format}
    done: torch.Tensor = aten._to_copy.default(_lowered(x), dtype=dtype, **options)
    if target.type == NAME:
        own = x.device.index if isinstance(x, SimTensor) else None
        index = target.index if target.index is not None else (STATE.current() if own is None else own)
        kind = "h2d" if own is None else ("d2d" if own == index else "peer")
        STATE.check_dtype(done.dtype)
        STATE.fire(f"copy.{kind}", index)
        STATE.moved(kind, done)
        return SimTensor(done, index)
    if target.type != "cpu":
        raise NotImplementedError(f"{NAME} to {target}")
    STATE.synchronize(x.device.index)
    STATE.fire("copy.d2h", x.device.index)
    STATE.moved("d2h", done)
    return done


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``target.copy_(source)`` where at least one of them is on the device."""
    if isinstance(target, SimTensor):
        same = source.device == target.device
        kind = "h2d" if not isinstance(source, SimTensor) else ("d2d" if same else "peer")
        index = target.device.index
    else:
        kind, index = "d2h", source.device.index
        STATE.synchronize(index)
    STATE.fire(f"copy.{kind}", index)
    STATE.moved(kind, _lowered(source))
    _lowered(target).copy_(_lowered(source))
    return target


def _item(x: SimTensor) -> Any:
    STATE.synchronize(x.device.index)
    STATE.moved("d2h", x._raw)
    return x._raw.item()


_SPECIAL: Mapping[str, Callable[..., Any]] = {
    "aten._to_copy": _to_copy,
    "aten.copy_": copy_,
    "aten._local_scalar_dense": _item,
    "aten.item": _item,
    "aten._fused_sdp_choice": lambda *args, **kwargs: 0,  # SDPBackend.MATH: plain matmul and softmax
}
