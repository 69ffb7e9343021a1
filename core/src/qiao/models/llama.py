"""Llama 2 and 3 and all that share their form: SmolLM2, TinyLlama, Yi, Mistral, InternLM3; and SmolLM3."""

from __future__ import annotations

from dataclasses import replace

from qiao.models.family import PRE_NORM, attention_layers, decoder, every_window, read_mlp, read_windows, renaming
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec

_translate = renaming(PRE_NORM)


def spec(settings: Settings, architecture: str) -> DecoderSpec:
    """Llama itself knows no sliding window, whatever its config says; Mistral slides in every layer."""
    if architecture == "SmolLM3ForCausalLM":
        return _smollm3(settings)
    if architecture == "InternLM3ForCausalLM":
        return _internlm3(settings)
    if architecture == "MistralForCausalLM":
        settings = settings.absent(num_key_value_heads=8, sliding_window=4096)
    windows = every_window(settings, enabled=architecture == "MistralForCausalLM")
    bias = settings.flag("attention_bias", False)
    attention = attention_layers(settings, windows, qkv_bias=bias, out_bias=bias)
    mlp = read_mlp(settings, settings.flag("mlp_bias", False))
    return decoder(settings, architecture, attention, mlp, translate=_translate)


def _internlm3(settings: Settings) -> DecoderSpec:
    """``bias`` covers the output projection and the feed-forward layers, ``qkv_bias`` the other three."""
    settings = settings.absent(num_key_value_heads=2, head_dim=128)
    bias = settings.flag("bias", settings.flag("mlp_bias", False))
    qkv_bias = settings.flag("qkv_bias", settings.flag("attention_bias", False))
    attention = attention_layers(settings, every_window(settings, enabled=False), qkv_bias=qkv_bias, out_bias=bias)
    return decoder(
        settings, "InternLM3ForCausalLM", attention, read_mlp(settings, bias), eps=1e-5, translate=_translate
    )


def _smollm3(settings: Settings) -> DecoderSpec:
    """Every ``no_rope_layer_interval``-th layer leaves positions out; ``no_rope_layers`` holds 1 where they count."""
    settings = settings.absent(num_key_value_heads=4)
    count = settings.integer("num_hidden_layers")
    interval = settings.integer("no_rope_layer_interval", 4)
    uses_rope = settings.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    if len(uses_rope) != count:
        raise settings.error("no_rope_layers", f"must have an entry for each of the {count} layers")
    slides = settings.flag("use_sliding_window", False)
    windows = read_windows(settings, lambda i: slides and not uses_rope[i], enabled=slides)
    bias = settings.flag("attention_bias", False)
    attention = attention_layers(settings, windows, theta=2000000.0, qkv_bias=bias, out_bias=bias)
    attention = tuple(a if used else replace(a, rope=None) for a, used in zip(attention, uses_rope, strict=True))
    mlp = read_mlp(settings, settings.flag("mlp_bias", False))
    return decoder(settings, "SmolLM3ForCausalLM", attention, mlp, tied=True, translate=_translate)
