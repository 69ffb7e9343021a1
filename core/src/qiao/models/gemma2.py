"""Gemma 2 (arXiv 2408.00118): norms by ``1 + w`` around both branches, soft caps, every other layer slides."""

from __future__ import annotations

import math
from dataclasses import replace

from qiao.layers.mlp import MlpSpec
from qiao.models.family import attention_layers, decoder, read_activation, read_windows, renaming
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec

NAMES = (
    (r"\.post_attention_layernorm\.", ".post_attn_out_layernorm."),
    (r"\.pre_feedforward_layernorm\.", ".pre_mlp_layernorm."),
    (r"\.post_feedforward_layernorm\.", ".post_mlp_out_layernorm."),
)
"""Gemma's names for its four norms."""

_translate = renaming(*NAMES)


def spec(settings: Settings, architecture: str) -> DecoderSpec:
    """See the module."""
    settings = settings.absent(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    settings = settings.absent(num_key_value_heads=4, head_dim=256, sliding_window=4096)
    refuse_bidirectional(settings)
    windows = read_windows(settings, lambda i: i % 2 == 0)
    bias = settings.flag("attention_bias", False)
    scale = settings.number("query_pre_attn_scalar", 256.0) ** -0.5
    cap = settings.number("attn_logit_softcapping", 0.0)
    attention = tuple(
        replace(a, scale=scale, soft_cap=cap) for a in attention_layers(settings, windows, qkv_bias=bias, out_bias=bias)
    )
    return decoder(
        settings,
        architecture,
        attention,
        gemma_mlp(settings),
        tied=True,
        norm_offset=True,
        sandwich=True,
        embedding_scale=math.sqrt(settings.integer("hidden_size")),
        soft_cap=settings.number("final_logit_softcapping", 0.0),
        translate=_translate,
    )


def gemma_mlp(settings: Settings) -> MlpSpec:
    """``hidden_activation`` is the field that counts; ``hidden_act`` of old files said gelu and meant its tanh form."""
    activation = read_activation(settings, "hidden_activation", "gelu_pytorch_tanh")
    return MlpSpec(settings.integer("intermediate_size"), activation)


def refuse_bidirectional(settings: Settings) -> None:
    """Raises ``ModelError`` for encoders made from Gemma."""
    if settings.flag("use_bidirectional_attention", False):
        raise settings.error("use_bidirectional_attention", "is true; only causal decoders can generate")
