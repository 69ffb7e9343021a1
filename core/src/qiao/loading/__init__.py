"""Models on disk: where they come from, and how their parts are read.

What only one side needs is loaded when it is first used: a front end reads configs and tokenizers, and no torch; an
engine reads weights, and no tokenizers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qiao.loading.config import config_file, load_config, plain_config, read_raw_config
from qiao.loading.generation import eos_token_ids, load_generation_config, sampling_defaults
from qiao.loading.pooling import Pooling, read_pooling
from qiao.loading.sources import ModelFiles, resolve

if TYPE_CHECKING:
    from qiao.loading.store import WeightStore
    from qiao.loading.tokenizer import load_text_tokenizer, load_tokenizer
    from qiao.loading.weights import iter_weights, quantization_of, quantized_weights

_HOMES = {
    "WeightStore": "qiao.loading.store",
    "iter_weights": "qiao.loading.weights",
    "load_text_tokenizer": "qiao.loading.tokenizer",
    "load_tokenizer": "qiao.loading.tokenizer",
    "quantization_of": "qiao.loading.weights",
    "quantized_weights": "qiao.loading.weights",
}

__all__ = [
    "ModelFiles",
    "Pooling",
    "WeightStore",
    "config_file",
    "eos_token_ids",
    "iter_weights",
    "load_config",
    "load_generation_config",
    "load_text_tokenizer",
    "load_tokenizer",
    "plain_config",
    "quantization_of",
    "quantized_weights",
    "read_pooling",
    "read_raw_config",
    "resolve",
    "sampling_defaults",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'qiao.loading' has no attribute {name!r}")
