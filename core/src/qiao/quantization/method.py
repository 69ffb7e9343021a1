"""Which method a checkpoint is quantized by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qiao.errors import ModelError


def method_of(config: Mapping[str, Any]) -> str | None:
    """The method that a ``config.json`` announces, by its usual name; None for a model that is not quantized."""
    entry = config.get("quantization_config") or config.get("compression_config")
    if not entry:
        return None
    return str(entry.get("quant_method", "unknown") if isinstance(entry, Mapping) else entry)


def refuse_method(method: str | None) -> None:
    """Raise ``ModelError`` for a method that cannot be loaded."""
    if method is not None:
        raise ModelError(
            f"config.json: quantization_config has quant_method {method!r}, which cannot be loaded yet; "
            "use the unquantized checkpoint or a GGUF file of the model"
        )
