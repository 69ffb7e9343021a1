"""ChatGLM2, ChatGLM3 and GLM-4 in the layout of their remote code (``transformer.encoder.layers...``).

The first half of each head turns, in interleaved pairs, with the frequencies of a head of that half's size
(THUDM/chatglm3-6b, modeling_chatglm.py). Scores are scaled by ``1 / sqrt(kv_channels)``: the layer factor of the
published code divides and multiplies and so cancels.
"""

from __future__ import annotations

from qiao.layers.attention import AttentionSpec
from qiao.layers.mlp import MlpSpec
from qiao.layers.rotary import RopeSpec
from qiao.models.family import decoder, renaming
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec

_translate = renaming(
    (r"^transformer\.embedding\.word_embeddings\.", "model.embed_tokens."),
    (r"^transformer\.output_layer\.", "lm_head."),
    (r"^transformer\.encoder\.final_layernorm\.", "model.norm."),
    (r"^transformer\.encoder\.layers\.", "model.layers."),
    (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.post_attention_layernorm\.", ".pre_mlp_layernorm."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
)


def spec(settings: Settings, architecture: str) -> DecoderSpec:
    """See the module. Raises ``ModelError`` for the options that no published checkpoint of these families uses."""
    _refuse(settings, "rmsnorm", True, "only RMS norms are supported")
    _refuse(settings, "post_layer_norm", True, "the final norm is required")
    _refuse(settings, "apply_residual_connection_post_layernorm", False, "the residual must skip the norm")
    heads, size = settings.integer("num_attention_heads"), settings.integer("kv_channels", 128)
    kv_heads = heads
    if settings.flag("multi_query_attention", False):
        kv_heads = settings.integer("multi_query_group_num", 1)
    if heads % kv_heads:
        raise settings.error("multi_query_group_num", f"is {kv_heads}, which does not divide {heads} attention heads")
    if size % 4:
        raise settings.error("kv_channels", f"is {size}; half of it must be rotated in pairs, so 4 must divide it")
    bias = settings.flag("add_bias_linear", False)
    attention = AttentionSpec(
        heads,
        kv_heads,
        size,
        size**-0.5,
        RopeSpec("default", 10000.0 * settings.number("rope_ratio", 1.0), size // 2, interleaved=True),
        qkv_bias=bias or settings.flag("add_qkv_bias", False),
        out_bias=bias,
    )
    count = settings.integer("num_layers", settings.get("num_hidden_layers"))
    vocab = settings.integer("padded_vocab_size", settings.get("vocab_size"))
    eps = settings.number("layernorm_epsilon", 1e-5)
    mlp = MlpSpec(settings.integer("ffn_hidden_size"), "silu", bias)
    return decoder(
        settings.changed(vocab_size=vocab, rms_norm_eps=eps),
        architecture,
        (attention,) * count,
        mlp,
        max_position=settings.integer("seq_length", settings.get("max_position_embeddings")),
        translate=_translate,
    )


def _refuse(settings: Settings, field: str, needed: bool, reason: str) -> None:
    if settings.flag(field, needed) is not needed:
        raise settings.error(field, f"is {str(not needed).lower()}; {reason}")
