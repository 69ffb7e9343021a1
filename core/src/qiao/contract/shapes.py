"""What the plan needs to know of a model and of a step: plain numbers, no tensors, no weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearShape:
    """``count`` linear layers [out_features, in_features] of one scheme; ``rows`` is what they are applied to.

    ``rows`` is ``"T"`` (each token), ``"N"`` (wanted logits rows only: the head), ``"X"`` (tokens routed to an
    expert: T times ``experts_per_token``, spread over ``count`` calls) or ``"L"`` (tokens with a LoRA adapter, in one
    call for each of at most ``max_loras``). ``group_size`` inputs of a quantized weight
    share a scale, -1 means all.
    """

    name: str
    in_features: int
    out_features: int
    count: int
    scheme: str = "dense"
    rows: str = "T"
    bias: bool = False
    group_size: int = -1


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """``count`` attention layers of one kind. ``sliding_window`` 0 and ``soft_cap`` 0.0 mean none."""

    count: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder as the plan sees it, read from its config alone.

    ``fused_calls`` counts per step how often each light operator runs, by hook name. ``kv_dtype`` is the cache's where
    the user chose another than the model's own. ``max_loras`` is how many LoRA adapters a step may mix, 0 without any.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    dtype: str
    max_position: int
    attention: tuple[AttentionShape, ...]
    linears: tuple[LinearShape, ...]
    fused_calls: tuple[tuple[str, int], ...] = ()
    experts_per_token: int = 0
    kv_dtype: str = ""
    max_loras: int = 0

    @property
    def cache_dtype(self) -> str:
        """The dtype of the KV cache."""
        return self.kv_dtype or self.dtype

    @property
    def num_layers(self) -> int:
        """Layers that keep a KV cache."""
        return sum(a.count for a in self.attention)

    @property
    def schemes(self) -> tuple[str, ...]:
        """Weight schemes in use, in order of first use."""
        return tuple(dict.fromkeys(x.scheme for x in self.linears))

    @property
    def kv_scale_bytes(self) -> int:
        """What the cache keeps beside each head's key or value of a token: an int8 one's scale; see ``KVCache``."""
        return 4 if self.cache_dtype == "int8" else 0

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of cache that one token takes over all layers, scales included."""
        scale = self.kv_scale_bytes
        return sum(2 * a.count * a.num_kv_heads * (a.head_dim * element_size + scale) for a in self.attention)


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step: ``tokens`` T new tokens of ``seqs`` B sequences, ``logits`` N wanted rows.

    ``context`` is the number of cached tokens a sequence, this step's included.
    ``table_width`` P is the width of the block tables.
    """

    tokens: int
    seqs: int
    logits: int
    context: int
    table_width: int = 1
