"""Gemma 3, text only (arXiv 2503.19786): Gemma 2 with normed heads and a rope of its own for sliding layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from qiao.layers.attention import AttentionSpec
from qiao.models.family import FULL, SLIDING, decoder, read_heads, read_layer_types, read_windows, renaming
from qiao.models.gemma2 import NAMES, gemma_mlp, refuse_bidirectional
from qiao.models.rope import rope_spec
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec
from qiao.quantization import Weight

_renamed = renaming(
    *NAMES,
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.", ""),
)
_IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def _translate(name: str, weight: Weight) -> Iterable[tuple[str, Weight]]:
    """The text model's tensors of either layout; those of the image encoder are left out."""
    return () if name.startswith(_IMAGES) else _renamed(name, weight)


def spec(settings: Settings, architecture: str) -> DecoderSpec:
    """See the module. ``Gemma3ForConditionalGeneration`` runs by its ``text_config``."""
    inner = settings.get("text_config")
    if isinstance(inner, Mapping):
        settings = Settings(inner, f"{settings.file}: text_config")
    settings = settings.absent(
        vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=4096
    )
    refuse_bidirectional(settings)
    return decoder(
        settings,
        architecture,
        _attention(settings),
        gemma_mlp(settings),
        tied=True,
        max_position=settings.integer("max_position_embeddings", 131072),
        norm_offset=True,
        sandwich=True,
        embedding_scale=math.sqrt(settings.integer("hidden_size")),
        soft_cap=settings.number("final_logit_softcapping", 0.0),
        translate=_translate,
    )


def _attention(settings: Settings) -> tuple[AttentionSpec, ...]:
    pattern = settings.integer("sliding_window_pattern", settings.integer("_sliding_window_pattern", 6))

    def slides(layer: int) -> bool:
        return (layer + 1) % pattern != 0

    types, windows = read_layer_types(settings, slides), read_windows(settings, slides)
    settings, heads = _by_layer_type(settings), read_heads(settings)
    ropes = {
        FULL: rope_spec(settings, heads.head_dim, theta=1000000.0, layer_type=FULL),
        SLIDING: rope_spec(settings, heads.head_dim, theta=10000.0, layer_type=SLIDING),
    }
    bias = settings.flag("attention_bias", False)
    return tuple(
        AttentionSpec(
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            settings.number("query_pre_attn_scalar", 256.0) ** -0.5,
            ropes[kind],
            sliding_window=window,
            soft_cap=settings.number("attn_logit_softcapping", 0.0),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
        )
        for kind, window in zip(types, windows, strict=True)
    )


def _by_layer_type(settings: Settings) -> Settings:
    """Older files: ``rope_theta`` and ``rope_scaling`` for full layers, ``rope_local_base_freq`` for sliding ones."""
    given = settings.get("rope_parameters", {})
    full: Any = given.get(FULL)
    if full is None:
        full = {"rope_theta": settings.get("rope_theta", 1000000.0), **settings.get("rope_scaling", {})}
    sliding: Any = given.get(SLIDING)
    if sliding is None:
        sliding = {"rope_theta": settings.get("rope_local_base_freq", 10000.0)}
    return settings.changed(rope_parameters={FULL: full, SLIDING: sliding}, rope_theta=None, rope_scaling=None)
