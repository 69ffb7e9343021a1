"""Models on disk: where they come from, and how their parts are read."""

from qiao.loading.config import load_config, read_raw_config
from qiao.loading.generation import eos_token_ids, load_generation_config, sampling_defaults
from qiao.loading.sources import ModelFiles, resolve
from qiao.loading.tokenizer import load_tokenizer
from qiao.loading.weights import iter_weights, quantization_of, quantized_weights

__all__ = [
    "ModelFiles",
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
