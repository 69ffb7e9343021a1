"""Models on disk: where they come from, and how their parts are read.

What reads weights is loaded when it is first used: a front end reads configs and tokenizers, and no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qiao.loading.config import load_config, read_raw_config
from qiao.loading.generation import eos_token_ids, load_generation_config, sampling_defaults
from qiao.loading.sources import ModelFiles, resolve
from qiao.loading.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from qiao.loading.store import WeightStore
    from qiao.loading.weights import iter_weights, quantization_of, quantized_weights

__all__ = [
    "ModelFiles",
    "WeightStore",
    "eos_token_ids",
    "iter_weights",
    "load_config",
    "load_generation_config",
    "load_tokenizer",
    "quantization_of",
    "quantized_weights",
    "read_raw_config",
    "resolve",
    "sampling_defaults",
]


def __getattr__(name: str) -> Any:
    if name in ("iter_weights", "quantization_of", "quantized_weights"):
        from qiao.loading import weights

        return getattr(weights, name)
    if name == "WeightStore":
        from qiao.loading.store import WeightStore

        return WeightStore
    raise AttributeError(f"module 'qiao.loading' has no attribute {name!r}")
