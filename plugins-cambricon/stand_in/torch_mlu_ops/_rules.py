"""How the stand-in checks a documented rule."""

from __future__ import annotations

import torch
from qiao_conformance.sim import kernels

Tensor = torch.Tensor
HEADS = (32, 64, 80, 96, 128, 160, 192, 224, 256, 512, 576)
HALVES = (torch.float16, torch.bfloat16)


class RuleError(RuntimeError):
    """A documented rule of the vendor's is broken."""


def ask(condition: bool, rule: str) -> None:
    """Raise ``RuleError`` where the rule is broken."""
    if not condition:
        raise RuleError(rule)


def enter(name: str, *tensors: Tensor | None) -> int:
    """Device and memory layout of the arguments; returns the device's index."""
    present = [t for t in tensors if t is not None]
    ask(all(t.device.type == "mlu" for t in present), f"{name}: tensors must be on mlu")
    ask(all(t.is_contiguous() for t in present), f"{name}: tensors must be contiguous")
    return kernels.launch(f"tmo.{name}", *present)


def same_dtype(name: str, *tensors: Tensor | None) -> None:
    """One floating dtype."""
    kinds = {t.dtype for t in tensors if t is not None}
    ask(len(kinds) == 1 and kinds <= {torch.float32, torch.float16, torch.bfloat16}, f"{name}: one dtype, not {kinds}")


def int32(name: str, *tensors: Tensor | None) -> None:
    """What all index tensors are."""
    ask(all(t is None or t.dtype == torch.int32 for t in tensors), f"{name}: indices, tables and lengths are int32")


def apart(name: str, out: Tensor, *tensors: Tensor) -> None:
    """Results have memory of their own."""
    places = {kernels.raw(t).untyped_storage().data_ptr() for t in tensors}
    ask(kernels.raw(out).untyped_storage().data_ptr() not in places, f"{name}: out must not alias an input")


def halves(name: str, *tensors: Tensor | None) -> None:
    """Operations that the manual lists for 16 bits only."""
    ask(all(t is None or t.dtype in HALVES for t in tensors), f"{name}: float16 or bfloat16 only")


def index32(payload: Tensor, index: int) -> Tensor:
    """An int32 result on device ``index``."""
    return kernels.wrap(payload.to(torch.int32), index)
