"""The one decoder that all families share: a ``DecoderSpec`` made of layers over an OpTable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from qiao.contract import AttentionMetadata, KVCache
from qiao.layers.attention import Attention, Step
from qiao.layers.embedding import Embedding
from qiao.layers.head import Head
from qiao.layers.linear import Linear
from qiao.layers.mlp import GatedMlp, MlpSpec
from qiao.layers.moe import MoeMlp
from qiao.layers.norm import RMSNorm
from qiao.layers.rotary import RotaryTable
from qiao.layers.weights import Target, fill
from qiao.models.spec import DecoderSpec, LayerSpec, shape_of
from qiao.optable import OpTable
from qiao.quantization import Weight

BUFFERS = re.compile(r"rotary_(pos_)?emb\.|\.(inv_freq|masked_bias)$|\.(k|v|kv|q|prob|output)_scale$")
"""Tensors without a use here: what older checkpoints saved though it follows from the config, and the scales with which
FP8 checkpoints suggest to store keys and values (an 8-bit cache here finds its own for each token)."""


class DecoderLayer:
    """Attention and a feed-forward layer. The residual travels beside ``x``, so that adding and norming are one."""

    def __init__(
        self, ops: OpTable, dtype: torch.dtype, name: str, model: DecoderSpec, spec: LayerSpec, rope_index: int
    ) -> None:
        hidden = model.hidden_size

        def norm(part: str) -> RMSNorm:
            return RMSNorm(ops, dtype, f"{name}.{part}", hidden, model.norm_eps, offset=model.norm_offset)

        self._input_norm, self._mlp_norm = norm("input_layernorm"), norm("pre_mlp_layernorm")
        self._after_attention = norm("post_attn_out_layernorm") if model.sandwich else None
        self._after_mlp = norm("post_mlp_out_layernorm") if model.sandwich else None
        self._attention = Attention(
            ops,
            dtype,
            f"{name}.self_attn",
            hidden,
            spec.attention,
            rope_index=rope_index,
            eps=model.norm_eps,
            norm_offset=model.norm_offset,
            forms=model.forms,
        )
        self._mlp: GatedMlp | MoeMlp
        if isinstance(spec.mlp, MlpSpec):
            self._mlp = GatedMlp(ops, dtype, f"{name}.mlp", hidden, spec.mlp, forms=model.forms)
        else:
            self._mlp = MoeMlp(ops, dtype, f"{name}.mlp", hidden, spec.mlp, forms=model.forms)

    def linears(self) -> list[Linear]:
        """The layers that may have adapters."""
        return self._attention.linears() + self._mlp.linears()

    def targets(self) -> dict[str, Target]:
        """Targets of all parts."""
        parts = (
            self._input_norm,
            self._mlp_norm,
            self._after_attention,
            self._after_mlp,
            self._attention,
            self._mlp,
        )
        return {name: target for part in parts if part is not None for name, target in part.targets().items()}

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` [T, E] is not yet added to ``residual`` [T, E]; returns the same pair for the next layer."""
        if residual is None:
            x, residual = self._input_norm(x), x
        else:
            x, residual = self._input_norm.add(x, residual)
        x = self._attention(x, step, cache)
        if self._after_attention is not None:
            x = self._after_attention(x)
        x, residual = self._mlp_norm.add(x, residual)
        x = self._mlp(x)
        if self._after_mlp is not None:
            x = self._after_mlp(x)
        return x, residual


class Decoder:
    """A model (``qiao.models.base.Model``) for any ``DecoderSpec``.

    ``max_length`` is the longest sequence in tokens that will be served: it sizes the rotary tables and settles the
    ropes that depend on it (see ``inverse_frequencies``). ``translate`` is the spec's.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        ops: OpTable,
        dtype: torch.dtype,
        max_length: int | None = None,
    ) -> None:
        self.shape = shape_of(spec, str(dtype).removeprefix("torch."))
        self.translate = spec.translate
        ropes = list(dict.fromkeys(x.attention.rope for x in spec.layers if x.attention.rope is not None))
        self._tables = [RotaryTable(rope, max_length or spec.max_position, ops.device) for rope in ropes]
        self._embedding = Embedding(
            ops, dtype, "model.embed_tokens", spec.vocab_size, spec.hidden_size, spec.embedding_scale
        )
        self._layers = [
            DecoderLayer(
                ops,
                dtype,
                f"model.layers.{i}",
                spec,
                layer,
                ropes.index(layer.attention.rope) if layer.attention.rope is not None else -1,
            )
            for i, layer in enumerate(spec.layers)
        ]
        self._norm = RMSNorm(ops, dtype, "model.norm", spec.hidden_size, spec.norm_eps, offset=spec.norm_offset)
        self._head = Head(
            ops,
            dtype,
            "lm_head",
            spec.vocab_size,
            spec.hidden_size,
            tied=spec.tied,
            soft_cap=spec.soft_cap,
            normalise=spec.head_normalised,
            forms=spec.forms,
        )
        self._tied = spec.tied
        self._packed = frozenset(name for name, target in self._targets().items() if target.packed)

    def _targets(self) -> dict[str, Target]:
        targets = {**self._embedding.targets(), **self._norm.targets(), **self._head.targets()}
        for layer in self._layers:
            targets.update(layer.targets())
        return targets

    def linears(self) -> list[Linear]:
        """The layers that may have adapters; their names are those that ``translate`` leads to."""
        return [linear for layer in self._layers for linear in layer.linears()]

    def packs(self, name: str, weight: Weight) -> bool:
        """Whether ``load`` keeps nothing of this weight of a checkpoint but what ``pack_weight`` makes of it."""
        parts = [part for part, _ in self._renamed([(name, weight)])]
        return bool(parts) and all(part in self._packed for part in parts)

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Take a checkpoint's weights one at a time; see ``Model.load``."""
        targets = self._targets()
        fill(targets, self._renamed(weights), either=(("model.embed_tokens.weight", "lm_head.weight"),) * self._tied)
        self._head.finish(self._embedding)

    def _renamed(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        for name, weight in weights:
            if not BUFFERS.search(name):
                yield from self.translate(name, weight)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Final hidden states [T, E]; see ``Model.forward``."""
        step = Step(metadata, metadata.decode_only, tuple(table.at(positions) for table in self._tables))
        x, residual = self._embedding(token_ids), None
        for layer, cache in zip(self._layers, caches, strict=True):
            x, residual = layer(x, residual, step, cache)
        assert residual is not None, "a decoder has at least one layer"
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [N, V] of ``hidden`` [N, E]."""
        return self._head(hidden)
