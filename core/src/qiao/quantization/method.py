"""Which method a checkpoint is quantized by, and what the method makes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from qiao.errors import ModelError
from qiao.quantization.awq import AWQ
from qiao.quantization.bitsandbytes import BitsAndBytes
from qiao.quantization.compressed import CompressedTensors
from qiao.quantization.fp8 import FP8
from qiao.quantization.gptq import GPTQ
from qiao.quantization.weight import QuantizedWeight, Weight, WeightForm


class Method(Protocol):
    """One way to quantize linear layers.

    A module of a checkpoint is quantized where it has a tensor named in ``markers``; its ``parts`` make one weight.
    """

    @property
    def name(self) -> str:
        """As checkpoints write it in ``quant_method``."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Tensors that only a quantized module has, by what follows the module's name."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """All tensors that a quantized module may have, without its bias."""
        ...

    def promise(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> QuantizedWeight | None:
        """The weight that ``weight`` will make, on the meta device, from the shapes of its parts; None for a plain one.

        Raises ``ModelError`` where the settings leave ``module`` out.
        """
        ...

    def form(self, module: str, columns: int) -> WeightForm | None:
        """How ``module``, a linear layer of ``columns`` inputs, is kept; None for floating point. Raises as above."""
        ...

    def weight(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Weight:
        """The weight [O, I] of ``module`` from its parts. Raises ``ModelError`` naming the tensor that is wrong."""
        ...


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Method]] = MappingProxyType(
    {
        "gptq": GPTQ,
        "awq": AWQ,
        "compressed-tensors": CompressedTensors,
        "fp8": FP8,
        "fbgemm_fp8": FP8,
        "modelopt": FP8,
        "bitsandbytes": BitsAndBytes,
    }
)


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization settings in the keys of a ``config.json``; None for a model that is not quantized."""
    entry = config.get("quantization_config") or config.get("compression_config")
    if not entry:
        return None
    return entry if isinstance(entry, Mapping) else {"quant_method": str(entry)}


def method_of(settings: Mapping[str, Any]) -> Method:
    """The method of quantization settings. Raises ``ModelError`` for one that cannot be loaded."""
    name = str(settings.get("quant_method") or "unknown")
    made = _METHODS.get(name)
    if made is None:
        raise ModelError(
            f"quantization_config has quant_method {name!r}, which cannot be loaded; {', '.join(_METHODS)} and GGUF "
            "files can. Use one of these, or the unquantized checkpoint."
        )
    return made(settings)
