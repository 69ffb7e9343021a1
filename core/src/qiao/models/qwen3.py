"""Qwen 3 (arXiv 2505.09388): each query and key head is normed, no biases."""

from __future__ import annotations

from qiao.models.family import PRE_NORM, attention_layers, decoder, read_mlp, renaming
from qiao.models.qwen2 import windows
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec

_translate = renaming(PRE_NORM)


def spec(settings: Settings, architecture: str) -> DecoderSpec:
    """See the module."""
    settings = settings.absent(head_dim=128)
    bias = settings.flag("attention_bias", False)
    attention = attention_layers(settings, windows(settings), qkv_bias=bias, out_bias=bias, qk_norm=True)
    return decoder(settings, architecture, attention, read_mlp(settings), translate=_translate)
