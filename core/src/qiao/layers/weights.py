"""How a checkpoint's weights reach the layers: each layer offers named targets, the loader fills them one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from qiao.errors import ModelError
from qiao.quantization import QuantizedWeight, Weight

_SHOWN = 5
"""Names that an error lists before it only counts."""


@dataclass(frozen=True, slots=True)
class Target:
    """A place for one checkpoint weight of exactly ``shape``.

    A fused tensor ``covers`` the names of its parts: either it comes, or they do. Of a weight that is ``packed`` the
    layer keeps what ``pack_weight`` makes of it, and nothing else.
    """

    shape: tuple[int, ...]
    put: Callable[[Weight], None]
    covers: tuple[str, ...] = ()
    packed: bool = False


def floating(name: str, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """``weight`` as a tensor of ``dtype``; float16, bfloat16, float32, float64 and quantized weights may come.

    Raises ``ModelError`` for integers, which are a quantized weight under a plain name, and for numbers that are too
    large for ``dtype``: as infinities they would make every answer of the model NaN.
    """
    tensor = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
    if not tensor.is_floating_point():
        raise ModelError(
            f"tensor {name} is {str(tensor.dtype).removeprefix('torch.')}, expected floating point; "
            "a quantized checkpoint must say so in config.json (quantization_config)"
        )
    if tensor.element_size() == 1:
        raise ModelError(
            f"tensor {name} is {str(tensor.dtype).removeprefix('torch.')} and has no scale beside it; "
            "the checkpoint is not complete, or its config.json lacks the quantization_config"
        )
    made = tensor.to(dtype)
    if dtype == torch.float16 and tensor.dtype != dtype and not tensor.is_meta:
        lost = made.isinf() & tensor.isfinite()
        if bool(lost.any()):
            raise ModelError(
                f"tensor {name} holds {float(tensor[lost][0]):g}, which float16 cannot (65504 is its largest number); "
                "use --dtype bfloat16 or float32"
            )
    return made


def _listing(names: Iterable[str]) -> str:
    """The first few of ``names`` and how many more there are."""
    every = sorted(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more


def fill(
    targets: Mapping[str, Target],
    weights: Iterable[tuple[str, Weight]],
    either: Sequence[tuple[str, str]] = (),
) -> None:
    """Put each of ``weights`` into its target, one at a time, none kept. Of a pair in ``either``, one is enough.

    A bias of zeros that has no target is left out. Raises ``ModelError`` naming tensors that have none, come twice,
    have another shape or are missing.
    """
    unexpected: list[str] = []
    seen: set[str] = set()
    for name, weight in weights:
        target = targets.get(name)
        if target is None:
            if not _zero_bias(name, weight):
                unexpected.append(name)
            continue
        if name in seen or seen.intersection(target.covers):
            raise ModelError(f"tensor {name} comes twice in the checkpoint, or both fused and in parts")
        if tuple(weight.shape) != target.shape:
            raise ModelError(
                f"tensor {name} has shape {list(weight.shape)}, but config.json asks for {list(target.shape)}; "
                "the weights and the config belong to different models"
            )
        target.put(weight)
        seen.add(name)
        seen.update(target.covers)
    for one, other in either:
        seen.update((one, other) if seen.intersection((one, other)) else ())
    missing = [n for n, t in targets.items() if n not in seen and not t.covers]
    if missing or unexpected:
        raise ModelError(_mismatch(missing, unexpected))


def _zero_bias(name: str, weight: Weight) -> bool:
    """Whether this is a bias that adds nothing: tools that quantize write one for layers that have none."""
    return name.endswith(".bias") and isinstance(weight, torch.Tensor) and not bool(weight.any())


def _mismatch(missing: list[str], unexpected: list[str]) -> str:
    found = []
    if missing:
        found.append(f"lacks tensors that the config asks for: {_listing(missing)}")
    if unexpected:
        found.append(f"holds tensors that this architecture does not use: {_listing(unexpected)}")
    return (
        f"the checkpoint {' and '.join(found)}; "
        "check that config.json belongs to these weights and that all shards are there"
    )
