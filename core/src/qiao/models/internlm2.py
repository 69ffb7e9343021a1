"""InternLM2 (arXiv 2403.17297): Llama with one stored tensor for queries, keys and values, grouped by key head."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qiao.errors import ModelError
from qiao.layers.attention import AttentionSpec
from qiao.models.family import attention_layers, decoder, every_window, read_mlp, renaming
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec, Translate
from qiao.quantization import Weight, take_rows

_renamed = renaming(
    (r"^model\.tok_embeddings\.", "model.embed_tokens."),
    (r"^output\.", "lm_head."),
    (r"\.attention\.wqkv\.", ".self_attn.qkv_proj."),
    (r"\.attention\.wo\.", ".self_attn.o_proj."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".pre_mlp_layernorm."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
)


def spec(settings: Settings, architecture: str) -> DecoderSpec:
    """See the module."""
    bias = settings.flag("bias", False)
    attention = attention_layers(settings, every_window(settings, enabled=False), qkv_bias=bias, out_bias=bias)
    return decoder(settings, architecture, attention, read_mlp(settings), translate=_translation(attention[0]))


def _translation(attention: AttentionSpec) -> Translate:
    """Rows of ``wqkv`` come as (key head, its queries then key then value, D); ours as all queries, keys, values."""
    kv_heads, size = attention.num_kv_heads, attention.head_dim
    group = attention.num_heads // kv_heads
    rows = kv_heads * (group + 2) * size
    parts = torch.arange(rows).view(kv_heads, group + 2, size).split((group, 1, 1), dim=1)
    order = torch.cat([part.flatten() for part in parts])

    def translate(name: str, weight: Weight) -> Iterable[tuple[str, Weight]]:
        if ".attention.wqkv." in name:
            if weight.shape[0] != rows:
                raise ModelError(f"tensor {name} has {weight.shape[0]} rows, config.json asks for {rows}")
            weight = take_rows(weight, order)
        return _renamed(name, weight)

    return translate
