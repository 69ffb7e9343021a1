"""Qwen 2 and Qwen 3 mixtures of experts; some layers may be plain."""

from __future__ import annotations

from qiao.layers.attention import AttentionSpec
from qiao.layers.mlp import MlpSpec
from qiao.layers.moe import MoeSpec
from qiao.models.family import (
    PRE_NORM,
    attention_layers,
    decoder,
    every_window,
    read_activation,
    read_experts,
    read_mlp,
    read_windows,
    renaming,
    unstacking,
)
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec

_translate = unstacking(renaming(PRE_NORM))


def spec(settings: Settings, architecture: str) -> DecoderSpec:
    """See the module."""
    activation = read_activation(settings)
    expert = MlpSpec(settings.integer("moe_intermediate_size"), activation)
    shared = None
    if architecture == "Qwen2MoeForCausalLM":
        attention = _qwen2_attention(settings)
        shared = MlpSpec(settings.integer("shared_expert_intermediate_size", 5632), activation)
    else:
        attention = _qwen3_attention(settings)
    count, chosen = read_experts(settings, ("num_experts", "num_local_experts"))
    moe = MoeSpec(count, chosen, expert, settings.flag("norm_topk_prob", False), shared)
    every, plain = settings.integer("decoder_sparse_step", 1), settings.get("mlp_only_layers", [])
    dense = None
    if every > 1 or plain:
        dense = read_mlp(settings)
    mlps = tuple(dense if dense is not None and (i in plain or (i + 1) % every) else moe for i in range(len(attention)))
    return decoder(settings, architecture, attention, mlps, translate=_translate)


def _qwen2_attention(settings: Settings) -> tuple[AttentionSpec, ...]:
    settings = settings.absent(num_key_value_heads=16, sliding_window=4096)
    slides, last = settings.flag("use_sliding_window", False), settings.integer("max_window_layers", 28, minimum=0)
    windows = read_windows(settings, lambda i: slides and i % 2 == 0 and i < last, enabled=slides)
    return attention_layers(settings, windows, qkv_bias=settings.flag("qkv_bias", True))


def _qwen3_attention(settings: Settings) -> tuple[AttentionSpec, ...]:
    settings = settings.absent(num_key_value_heads=4, sliding_window=4096)
    windows = every_window(settings, enabled=settings.flag("use_sliding_window", False))
    bias = settings.flag("attention_bias", False)
    return attention_layers(settings, windows, qkv_bias=bias, out_bias=bias, qk_norm=True)
