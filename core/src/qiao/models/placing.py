"""What a device and the user's policy make of a model before it is planned: its dtype, and what stays quantized."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from qiao.config import dtype_name
from qiao.contract import Capabilities, ModelShape
from qiao.errors import ParameterError
from qiao.models import describe
from qiao.quantization import QuantizedWeight

logger = logging.getLogger(__name__)

Quantized = Mapping[str, QuantizedWeight]
"""Weights that a checkpoint holds quantized, by name, on the meta device."""

_NONE: Quantized = MappingProxyType({})


def shape_for(config: Any, dtype: str, capabilities: Capabilities, quantized: Quantized = _NONE) -> ModelShape:
    """The model's shape with the dtype that it will run in.

    ``auto`` keeps the checkpoint's dtype where the chip has it, else takes the chip's first.
    The KV cache of a quantized model that runs in float32 is float16 where the device has it: half the memory and the
    reading, for an error far below that of the weights. Raises ``ParameterError`` for a dtype that the chip lacks.
    """
    shape = describe(config, quantized)
    name = dtype_name(dtype)
    if name == "auto":
        name = shape.dtype if shape.dtype in capabilities.dtypes else capabilities.dtypes[0]
        if name != shape.dtype:
            logger.warning("the device has no %s; the model runs in %s", shape.dtype, name)
    elif name not in capabilities.dtypes:
        raise ParameterError(
            "dtype", f"{name} is not supported by this device; it has {', '.join(capabilities.dtypes)}"
        )
    shrinks = bool(quantized) and name == "float32" and "float16" in capabilities.kv_dtypes
    return replace(shape, dtype=name, kv_dtype="float16" if shrinks else shape.kv_dtype)


def keep_quantized(
    quantized: Quantized, ask: Callable[[Quantized], tuple[ModelShape, frozenset[str]]]
) -> tuple[Quantized, frozenset[str], ModelShape]:
    """Which of ``quantized`` stay so, the schemes of the others, which become floating point at load, and the shape.

    ``ask`` gives the shape of a model and the schemes of it that shall not stay. It is asked anew without them, since
    weights that are multiplied as one are floating point together.
    """
    lost: frozenset[str] = frozenset()
    while True:
        kept = {name: weight for name, weight in quantized.items() if weight.form.scheme not in lost}
        shape, found = ask(kept)
        more = found - lost
        if not more:
            return kept, lost, shape
        logger.warning("the device lacks %s: these weights become floating point at load", ", ".join(sorted(more)))
        lost |= more
