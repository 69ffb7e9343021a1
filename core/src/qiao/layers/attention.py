"""Grouped-query attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qiao.contract import AttentionMetadata, KVCache
from qiao.layers.linear import Linear, single
from qiao.layers.norm import RMSNorm
from qiao.layers.rotary import RopeSpec
from qiao.layers.weights import Target
from qiao.optable import OpTable
from qiao.quantization import NO_FORMS, Forms


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer: H query heads and K key/value heads of size D.

    ``scale`` multiplies the scores; ``sliding_window`` 0 and ``soft_cap`` 0.0 mean none; ``rope`` None leaves positions
    out; ``qk_norm`` norms each query and key head before the rotation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    sliding_window: int = 0
    soft_cap: float = 0.0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one step share. ``rope`` holds (cos, sin) [T, R/2] of its positions for each rope kind."""

    metadata: AttentionMetadata
    decode: bool
    rope: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class Attention:
    """Fused query/key/value projection, rotation, cache write, attention, output projection.

    ``rope_index`` picks this layer's kind from ``Step.rope``; it is not read where ``spec.rope`` is None.
    """

    def __init__(
        self,
        ops: OpTable,
        dtype: torch.dtype,
        name: str,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        rope_index: int,
        eps: float,
        norm_offset: bool = False,
        forms: Forms = NO_FORMS,
    ) -> None:
        self._ops, self._spec, self._rope_index = ops, spec, rope_index
        query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._sizes = (query, key, key)
        parts = {f"{name}.q_proj": query, f"{name}.k_proj": key, f"{name}.v_proj": key}
        self.qkv = Linear(ops, dtype, f"{name}.qkv_proj", hidden_size, parts, bias=spec.qkv_bias, forms=forms)
        self.out = single(ops, dtype, f"{name}.o_proj", query, hidden_size, bias=spec.out_bias, forms=forms)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(ops, dtype, f"{name}.q_norm", spec.head_dim, eps, offset=norm_offset)
            self.k_norm = RMSNorm(ops, dtype, f"{name}.k_norm", spec.head_dim, eps, offset=norm_offset)
        self._decode_attention = ops.decode_attention or ops.attention

    def parts(self) -> list[Linear | RMSNorm]:
        """The layers that hold weights."""
        return [x for x in (self.qkv, self.out, self.q_norm, self.k_norm) if x is not None]

    def linears(self) -> list[Linear]:
        """The layers that may have adapters."""
        return [self.qkv, self.out]

    def targets(self) -> dict[str, Target]:
        """Targets of all parts."""
        return {name: target for part in self.parts() for name, target in part.targets().items()}

    def __call__(self, x: torch.Tensor, step: Step, cache: KVCache) -> torch.Tensor:
        """``x`` [T, E]; writes this step's keys and values to ``cache``; returns [T, E]."""
        spec, tokens = self._spec, x.shape[0]
        query, key, value = self.qkv(x).split(self._sizes, dim=-1)
        query = query.view(tokens, spec.num_heads, spec.head_dim)
        key = key.view(tokens, spec.num_kv_heads, spec.head_dim)
        value = value.view(tokens, spec.num_kv_heads, spec.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query = self._rotate_and_write(query, key, value, step, cache)
        attend = self._decode_attention if step.decode else self._ops.attention
        mixed = attend(query, cache, step.metadata, spec.scale, spec.sliding_window, spec.soft_cap)
        return self.out(mixed.reshape(tokens, self._sizes[0]))

    def _rotate_and_write(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, cache: KVCache
    ) -> torch.Tensor:
        ops, rope, slots = self._ops, self._spec.rope, step.metadata.slot_mapping
        if rope is None:
            ops.write_kv(key, value, cache, slots)
            return query
        cos, sin = step.rope[self._rope_index]
        if ops.rope_write_kv is not None:
            return ops.rope_write_kv(query, key, value, cos, sin, rope.interleaved, cache, slots)
        query, key = ops.rotary(query, key, cos, sin, rope.interleaved)
        ops.write_kv(key, value, cache, slots)
        return query
