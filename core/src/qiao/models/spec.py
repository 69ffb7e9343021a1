"""A decoder as plain data: every family reads its config into a ``DecoderSpec``, from which all else follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from qiao.contract import AttentionShape, LinearShape, ModelShape
from qiao.layers.attention import AttentionSpec
from qiao.layers.mlp import MlpSpec
from qiao.layers.moe import MoeSpec

Translate = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
"""From a checkpoint's tensor to the names of ``Decoder``: none to ignore it, several to take it apart."""


def keep_names(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """For checkpoints that use the decoder's own names."""
    yield name, tensor


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer."""

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder.

    ``norm_offset``: norms multiply by ``1 + weight``. ``sandwich``: a norm after attention and after the feed-forward
    layer too, before each is added. ``embedding_scale`` multiplies embeddings. ``tied``: the head is the embedding.
    ``soft_cap`` 0.0 means none. ``max_position`` is the context in tokens. ``translate`` maps tensor names.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    norm_offset: bool = False
    sandwich: bool = False
    embedding_scale: float = 1.0
    tied: bool = False
    head_normalised: bool = False
    soft_cap: float = 0.0
    scheme: str = "dense"
    translate: Translate = keep_names


def shape_of(spec: DecoderSpec, dtype: str) -> ModelShape:
    """The ``ModelShape`` of ``spec``, with the linear layers and light operators exactly as ``Decoder`` calls them.

    ``fused_calls`` counts the ``rotary`` calls of a table without ``rope_write_kv``, which replaces them. Experts count
    as if each got at least one token: a step calls those that did.
    """
    attention = Counter(_attention_shape(layer.attention) for layer in spec.layers)
    experts = {layer.mlp.top_k for layer in spec.layers if isinstance(layer.mlp, MoeSpec)}
    return ModelShape(
        architecture=spec.architecture,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        dtype=dtype,
        max_position=spec.max_position,
        attention=tuple(
            AttentionShape(n, a.num_heads, a.num_kv_heads, a.head_dim, a.sliding_window, a.soft_cap)
            for a, n in attention.items()
        ),
        linears=_linear_shapes(spec),
        fused_calls=tuple(sorted(_light_calls(spec).items())),
        experts_per_token=max(experts, default=0),
    )


def _attention_shape(spec: AttentionSpec) -> AttentionShape:
    return AttentionShape(1, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.sliding_window, spec.soft_cap)


def _linear_shapes(spec: DecoderSpec) -> tuple[LinearShape, ...]:
    hidden, found = spec.hidden_size, Counter[LinearShape]()

    def add(name: str, inputs: int, outputs: int, bias: bool = False, count: int = 1, rows: str = "T") -> None:
        scheme = spec.scheme if name not in ("router", "shared_expert_gate", "lm_head") else "dense"
        found[LinearShape(name, inputs, outputs, 1, scheme, rows, bias)] += count

    def add_mlp(prefix: str, mlp: MlpSpec, count: int = 1, rows: str = "T") -> None:
        add(f"{prefix}gate_up", hidden, 2 * mlp.intermediate, mlp.bias, count, rows)
        add(f"{prefix}down", mlp.intermediate, hidden, mlp.bias, count, rows)

    for layer in spec.layers:
        a, mlp = layer.attention, layer.mlp
        add("qkv", hidden, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim, a.qkv_bias)
        add("o", a.num_heads * a.head_dim, hidden, a.out_bias)
        if isinstance(mlp, MlpSpec):
            add_mlp("", mlp)
            continue
        add("router", hidden, mlp.num_experts)
        add_mlp("expert_", mlp.expert, mlp.num_experts, "X")
        if mlp.shared is not None:
            add_mlp("shared_expert_", mlp.shared)
            add("shared_expert_gate", hidden, 1)
    add("lm_head", hidden, spec.vocab_size, rows="N")
    return tuple(
        LinearShape(x.name, x.in_features, x.out_features, count, x.scheme, x.rows, x.bias)
        for x, count in found.items()
    )


def _light_calls(spec: DecoderSpec) -> dict[str, int]:
    layers = len(spec.layers)
    calls = Counter({"rms_norm": 1, "add_rms_norm": 2 * layers})
    for layer in spec.layers:
        calls["rms_norm"] += 2 * layer.attention.qk_norm + 2 * spec.sandwich
        calls["rotary"] += layer.attention.rope is not None
        mlp = layer.mlp
        if isinstance(mlp, MlpSpec):
            calls[f"{mlp.activation}_mul"] += 1
            continue
        calls[f"{mlp.expert.activation}_mul"] += mlp.num_experts
        if mlp.shared is not None:
            calls[f"{mlp.shared.activation}_mul"] += 1
    return {name: count for name, count in calls.items() if count}
