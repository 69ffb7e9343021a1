"""Baichuan 1 and 2 with 7B parameters (arXiv 2309.10305): Llama with ``W_pack``; the second norms the head's rows."""

from __future__ import annotations

from qiao.models.family import PRE_NORM, attention_layers, decoder, every_window, read_mlp, renaming
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec

_BAICHUAN2_VOCABULARY = 125696

_translate = renaming(PRE_NORM, (r"\.W_pack\.", ".qkv_proj."))


def spec(settings: Settings, architecture: str) -> DecoderSpec:
    """The 13B models take ALiBi instead of rope and have no ``max_position_embeddings``: ``ModelError``."""
    if settings.get("max_position_embeddings") is None or settings.integer("hidden_size") == 5120:
        raise settings.error(
            "max_position_embeddings",
            "is missing or belongs to a 13B Baichuan, which uses ALiBi instead of rotary positions; "
            "that is not supported, use the 7B model",
        )
    second = settings.integer("vocab_size") == _BAICHUAN2_VOCABULARY or "z_loss_weight" in settings.raw
    attention = attention_layers(settings, every_window(settings, enabled=False))
    return decoder(settings, architecture, attention, read_mlp(settings), head_normalised=second, translate=_translate)
