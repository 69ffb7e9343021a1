"""Phi-3 and Phi-4 (arXiv 2404.14219): fused projections in the checkpoint, LongRoPE, a sliding window in some."""

from __future__ import annotations

from qiao.models.family import PRE_NORM, attention_layers, decoder, every_window, read_mlp, renaming
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec

_translate = renaming(PRE_NORM)


def spec(settings: Settings, architecture: str) -> DecoderSpec:
    """See the module."""
    settings = settings.absent(original_max_position_embeddings=4096)
    attention = attention_layers(settings, every_window(settings))
    return decoder(settings, architecture, attention, read_mlp(settings), eps=1e-5, translate=_translate)
