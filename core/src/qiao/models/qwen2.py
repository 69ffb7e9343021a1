"""Qwen 2 and 2.5 (arXiv 2407.10671): biases on queries, keys and values; later layers may slide."""

from __future__ import annotations

from qiao.models.family import PRE_NORM, attention_layers, decoder, read_mlp, read_windows, renaming
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec

_translate = renaming(PRE_NORM)


def windows(settings: Settings) -> tuple[int, ...]:
    """Layers from ``max_window_layers`` on slide where ``use_sliding_window`` is true, or those of ``layer_types``."""
    first = settings.integer("max_window_layers", 28, minimum=0)
    settings = settings.absent(sliding_window=4096)
    return read_windows(settings, lambda i: i >= first, enabled=settings.flag("use_sliding_window", False))


def spec(settings: Settings, architecture: str) -> DecoderSpec:
    """See the module."""
    attention = attention_layers(settings, windows(settings), qkv_bias=True)
    return decoder(settings, architecture, attention, read_mlp(settings), translate=_translate)
