"""What the families have in common: reading heads, windows, activations, and renaming tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from qiao.layers.attention import AttentionSpec
from qiao.layers.mlp import MlpSpec
from qiao.layers.moe import MoeSpec
from qiao.models.rope import context_length, rope_spec
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec, LayerSpec, Translate
from qiao.quantization import Weight

SLIDING = "sliding_attention"
FULL = "full_attention"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "swiglu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}


@dataclass(frozen=True, slots=True)
class Heads:
    """H, K and D of a config."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_heads(settings: Settings) -> Heads:
    """Head counts and size; ``num_key_value_heads`` and ``head_dim`` may be absent or null.

    Raises ``ModelError`` where the counts do not divide.
    """
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    kv_heads = settings.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise settings.error("num_key_value_heads", f"is {kv_heads}, which does not divide {heads} attention heads")
    if settings.get("head_dim") is None and hidden % heads:
        raise settings.error(
            "hidden_size", f"is {hidden}, not a multiple of num_attention_heads {heads}, and there is no head_dim"
        )
    return Heads(heads, kv_heads, settings.integer("head_dim", hidden // heads))


def read_activation(settings: Settings, field: str = "hidden_act", default: str = "silu") -> str:
    """``silu`` or ``gelu`` (tanh form)."""
    name = settings.text(field, default)
    if name not in _ACTIVATIONS:
        raise settings.error(field, f"is {name!r}; this family runs with {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def read_mlp(settings: Settings, bias: bool = False) -> MlpSpec:
    """The gated feed-forward layer."""
    return MlpSpec(settings.integer("intermediate_size"), read_activation(settings), bias)


def read_layer_types(settings: Settings, default: Callable[[int], bool]) -> tuple[str, ...]:
    """The attention type of each layer: ``layer_types`` where given, else ``default`` says which layers slide."""
    count = settings.integer("num_hidden_layers")
    given = settings.get("layer_types")
    if given is None:
        return tuple(SLIDING if default(i) else FULL for i in range(count))
    if not isinstance(given, list | tuple) or len(given) != count:
        raise settings.error("layer_types", f"must list the type of each of the {count} layers, got {given!r}")
    unknown = sorted({str(x) for x in given} - {SLIDING, FULL})
    if unknown:
        raise settings.error("layer_types", f"has the unknown type {unknown[0]!r}; known are {SLIDING} and {FULL}")
    return tuple(given)


def read_windows(settings: Settings, slides: Callable[[int], bool], *, enabled: bool = True) -> tuple[int, ...]:
    """The sliding window of each layer, 0 for none."""
    types = read_layer_types(settings, slides)
    if not enabled or settings.get("sliding_window") is None:
        return (0,) * len(types)
    window = settings.integer("sliding_window", minimum=0)
    return tuple(window if kind == SLIDING else 0 for kind in types)


def every_window(settings: Settings, *, enabled: bool = True) -> tuple[int, ...]:
    """One window for all layers, where there is one."""
    window = settings.integer("sliding_window", 0, minimum=0) if enabled else 0
    return (window,) * settings.integer("num_hidden_layers")


def attention_layers(
    settings: Settings,
    windows: tuple[int, ...],
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
) -> tuple[AttentionSpec, ...]:
    """One rope for all layers, ``1 / sqrt(D)`` as scale, a window for each layer."""
    heads = read_heads(settings)
    rope = rope_spec(settings, heads.head_dim, theta=theta, partial=partial, interleaved=interleaved)
    return tuple(
        AttentionSpec(
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            heads.head_dim**-0.5,
            rope,
            sliding_window=window,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=qk_norm,
        )
        for window in windows
    )


def decoder(
    settings: Settings,
    architecture: str,
    attention: tuple[AttentionSpec, ...],
    mlps: MlpSpec | tuple[MlpSpec | MoeSpec, ...],
    *,
    eps: float = 1e-6,
    tied: bool = False,
    max_position: int | None = None,
    norm_offset: bool = False,
    sandwich: bool = False,
    embedding_scale: float = 1.0,
    head_normalised: bool = False,
    soft_cap: float = 0.0,
    translate: Translate,
) -> DecoderSpec:
    """A ``DecoderSpec`` from the layers and the fields that nearly all configs share, with the family's defaults."""
    if isinstance(mlps, MlpSpec):
        mlps = (mlps,) * len(attention)
    rope = next((a.rope for a in attention if a.rope is not None), None)
    return DecoderSpec(
        architecture=architecture,
        hidden_size=settings.integer("hidden_size"),
        vocab_size=settings.integer("vocab_size"),
        max_position=max_position or context_length(settings, rope),
        layers=tuple(LayerSpec(a, m) for a, m in zip(attention, mlps, strict=True)),
        norm_eps=settings.number("rms_norm_eps", eps),
        norm_offset=norm_offset,
        sandwich=sandwich,
        embedding_scale=embedding_scale,
        tied=settings.flag("tie_word_embeddings", tied),
        head_normalised=head_normalised,
        soft_cap=soft_cap,
        translate=translate,
    )


def renaming(*rules: tuple[str, str]) -> Translate:
    """A translation by regular expressions, each applied to each name in order."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def translate(name: str, weight: Weight) -> Iterable[tuple[str, Weight]]:
        for pattern, replacement in compiled:
            name = pattern.sub(replacement, name)
        yield name, weight

    return translate


def unstacking(inner: Translate) -> Translate:
    """``inner`` after taking apart expert weights that are stored as one tensor [experts, O, I] each."""
    stacked = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")

    def translate(name: str, weight: Weight) -> Iterable[tuple[str, Weight]]:
        match = stacked.match(name)
        if match is None or not isinstance(weight, torch.Tensor):
            yield from inner(name, weight)
            return
        for i, expert in enumerate(weight):
            yield from inner(f"{match[1]}.{i}.{match[2]}.weight", expert)

    return translate


def read_experts(settings: Settings, names: tuple[str, str], chosen: int | None = None) -> tuple[int, int]:
    """How many experts there are, under either of ``names``, and how many a token visits."""
    field = names[0] if settings.get(names[0]) is not None else names[1]
    count = settings.integer(field if settings.get(field) is not None else names[0])
    chosen = settings.integer("num_experts_per_tok", chosen)
    if chosen > count:
        raise settings.error("num_experts_per_tok", f"is {chosen}, more than the {count} experts of {field}")
    return count, chosen


PRE_NORM = (r"\.post_attention_layernorm\.", ".pre_mlp_layernorm.")
"""Llama's name for the norm before the feed-forward layer, which other families use for another norm."""
