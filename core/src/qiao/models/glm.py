"""GLM-4 in transformers' own layout: half of each head turns, in interleaved pairs; GLM-4-0414 norms both branches."""

from __future__ import annotations

from qiao.models.family import PRE_NORM, attention_layers, decoder, every_window, read_mlp, renaming
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec

_translate = renaming(
    PRE_NORM,
    (r"\.post_self_attn_layernorm\.", ".post_attn_out_layernorm."),
    (r"\.post_mlp_layernorm\.", ".post_mlp_out_layernorm."),
)


def spec(settings: Settings, architecture: str) -> DecoderSpec:
    """See the module."""
    settings = settings.absent(num_key_value_heads=2, head_dim=128)
    attention = attention_layers(
        settings,
        every_window(settings, enabled=False),
        partial=0.5,
        interleaved=True,
        qkv_bias=settings.flag("attention_bias", True),
    )
    sandwich = architecture == "Glm4ForCausalLM"
    return decoder(
        settings, architecture, attention, read_mlp(settings), eps=1.5625e-7, sandwich=sandwich, translate=_translate
    )
