"""A decoder as plain data: every family reads its config into a ``DecoderSpec``, from which all else follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from qiao.contract import AttentionShape, LinearShape, ModelShape
from qiao.layers.attention import AttentionSpec
from qiao.layers.mlp import MlpSpec
from qiao.layers.moe import MoeSpec
from qiao.quantization import NO_FORMS, Forms, QuantizedWeight, Weight, WeightForm, form_of

Translate = Callable[[str, Weight], Iterable[tuple[str, Weight]]]
"""From a checkpoint's weight to the names of ``Decoder``: none to ignore it, several to take it apart."""


def keep_names(name: str, weight: Weight) -> Iterable[tuple[str, Weight]]:
    """For checkpoints that use the decoder's own names."""
    yield name, weight


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
    ``forms`` says how linear weights are stored, under the names of ``Decoder``.
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
    forms: Forms = field(default_factory=lambda: NO_FORMS)
    translate: Translate = keep_names


def with_forms(spec: DecoderSpec, quantized: Mapping[str, QuantizedWeight]) -> DecoderSpec:
    """``spec`` with the forms of a checkpoint's quantized weights, given under the checkpoint's own names.

    A head that is tied to a quantized embedding is quantized as it is; one whose rows are normed is floating point.
    """
    forms = {
        new.removesuffix(".weight"): weight.form
        for name, held in quantized.items()
        for new, weight in spec.translate(name, held)
        if isinstance(weight, QuantizedWeight)
    }
    embedding = forms.pop("model.embed_tokens", None)
    if spec.tied and embedding is not None:
        forms.setdefault("lm_head", embedding)
    if spec.head_normalised:
        forms.pop("lm_head", None)
    return replace(spec, forms=forms)


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
    found = Counter[LinearShape]()
    for i, layer in enumerate(spec.layers):
        name, a = f"model.layers.{i}", layer.attention
        width = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        form = form_of(spec.forms, f"{name}.self_attn.qkv_proj", [f"{name}.self_attn.{x}_proj" for x in "qkv"])
        found[_shape("qkv", spec.hidden_size, width, form, a.qkv_bias)] += 1
        form = form_of(spec.forms, f"{name}.self_attn.o_proj", ())
        found[_shape("o", a.num_heads * a.head_dim, spec.hidden_size, form, a.out_bias)] += 1
        found.update(_mlp_shapes(spec, layer.mlp, f"{name}.mlp"))
    head = _shape("lm_head", spec.hidden_size, spec.vocab_size, form_of(spec.forms, "lm_head", ()))
    found[replace(head, rows="N")] += 1
    return tuple(replace(shape, count=count) for shape, count in found.items())


def _shape(name: str, inputs: int, outputs: int, form: WeightForm, bias: bool = False) -> LinearShape:
    return LinearShape(name, inputs, outputs, 1, form.scheme, "T", bias, form.group_size)


def _mlp_shapes(spec: DecoderSpec, mlp: MlpSpec | MoeSpec, name: str) -> Iterator[LinearShape]:
    """One shape for each linear layer of a feed-forward layer called ``name``."""
    hidden = spec.hidden_size

    def gated(prefix: str, inner: MlpSpec, at: str, rows: str = "T") -> Iterator[LinearShape]:
        form = form_of(spec.forms, f"{at}.gate_up_proj", (f"{at}.gate_proj", f"{at}.up_proj"))
        yield replace(_shape(f"{prefix}gate_up", hidden, 2 * inner.intermediate, form, inner.bias), rows=rows)
        form = form_of(spec.forms, f"{at}.down_proj", ())
        yield replace(_shape(f"{prefix}down", inner.intermediate, hidden, form, inner.bias), rows=rows)

    if isinstance(mlp, MlpSpec):
        yield from gated("", mlp, name)
        return
    yield _shape("router", hidden, mlp.num_experts, form_of(spec.forms, f"{name}.gate", ()))
    for expert in range(mlp.num_experts):
        yield from gated("expert_", mlp.expert, f"{name}.experts.{expert}", "X")
    if mlp.shared is not None:
        yield from gated("shared_expert_", mlp.shared, f"{name}.shared_expert")
        yield _shape("shared_expert_gate", hidden, 1, form_of(spec.forms, f"{name}.shared_expert_gate", ()))


def _light_calls(spec: DecoderSpec) -> dict[str, int]:
    layers = len(spec.layers)
    calls = Counter({"rms_norm": 1, "add_rms_norm": 2 * layers, "cap_logits": int(spec.soft_cap > 0)})
    for layer in spec.layers:
        calls["rms_norm"] += 2 * layer.attention.qk_norm + 2 * spec.sandwich
        calls["rotary"] += layer.attention.rope is not None
        mlp = layer.mlp
        if isinstance(mlp, MlpSpec):
            calls[f"{mlp.activation}_mul"] += 1
            continue
        calls["route_experts"] += 1
        calls["combine_experts"] += 1
        calls[f"{mlp.expert.activation}_mul"] += mlp.num_experts
        if mlp.shared is not None:
            calls[f"{mlp.shared.activation}_mul"] += 1
    return {name: count for name, count in calls.items() if count}
