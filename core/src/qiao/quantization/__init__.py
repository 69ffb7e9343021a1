"""Weight schemes: which one a checkpoint uses, and how its tensors reach ``pack_weight``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qiao.errors import ModelError


def weight_scheme(config: Mapping[str, Any]) -> str:
    """The scheme of the linear layers that a ``config.json`` announces; only ``dense`` so far.

    Raises ``ModelError`` naming the method for a checkpoint with quantized tensors.
    """
    entry = config.get("quantization_config") or config.get("compression_config")
    if not entry:
        return "dense"
    method = entry.get("quant_method", "unknown") if isinstance(entry, Mapping) else entry
    raise ModelError(
        f"config.json: quantization_config has quant_method {method!r}, which cannot be loaded yet; "
        "use the unquantized checkpoint or a GGUF file of the model"
    )
