"""What a drawn case is made from: plain numbers that print as the call that makes them."""

from __future__ import annotations

from dataclasses import dataclass

from qiao.contract.cases import paged


@dataclass(frozen=True)
class Paged:
    """A ragged batch: ``sequences`` of (queries, context); the cache has ``spare`` blocks that nobody uses."""

    dtype: str
    kept: str
    layout: str
    block_size: int
    head_dim: int
    kv_heads: int
    group: int
    sequences: tuple[tuple[int, int], ...]
    window: int
    soft_cap: float
    spare: int
    seed: int

    @property
    def parts(self) -> tuple[paged.Batch, paged.Kind]:
        """The same as records of the fixed cases."""
        queries, contexts = zip(*self.sequences, strict=True)
        heads = self.kv_heads * self.group
        batch = paged.Batch("drawn", queries, contexts, heads, self.kv_heads, self.window, self.soft_cap)
        return batch, paged.Kind(self.dtype, self.kept, self.layout, self.block_size, self.head_dim)


@dataclass(frozen=True)
class Write:
    """``tokens`` new vectors, ``padding`` of which have the slot -1."""

    cache: Paged
    tokens: int
    padding: int


@dataclass(frozen=True)
class Linear:
    """A product of ``tokens`` rows with a weight of ``scheme``, whose last group lacks ``short`` inputs."""

    dtype: str
    scheme: str
    tokens: int
    rows: int
    groups: int
    group: int
    short: int
    options: str
    bias: bool
    seed: int

    @property
    def columns(self) -> int:
        """Inputs."""
        return self.groups * self.group - self.short


@dataclass(frozen=True)
class Sampling:
    """``rows`` of (temperature, top_k, top_p, min_p) over ``vocab`` tokens; with ``ties`` many logits are equal."""

    vocab: int
    rows: tuple[tuple[float, int, float, float], ...]
    ties: bool
    seed: int


@dataclass(frozen=True)
class Light:
    """``tokens`` rows of ``size``; heads and pairs matter to rotations only."""

    dtype: str
    tokens: int
    size: int
    heads: int
    pairs: int
    interleaved: bool
    seed: int


@dataclass(frozen=True)
class Experts:
    """Rows of activations for the experts ``choice``, out of ``count`` weights like ``weight``."""

    weight: Linear
    count: int
    choice: tuple[int, ...]

    @property
    def seed(self) -> int:
        """That of the numbers."""
        return self.weight.seed


@dataclass(frozen=True)
class Routed:
    """``tokens`` sent to ``top_k`` of ``experts``, whose results have ``size`` numbers."""

    dtype: str
    tokens: int
    experts: int
    top_k: int
    size: int
    normalise: bool
    seed: int


@dataclass(frozen=True)
class Capped:
    """``rows`` of ``vocab`` logits, some far beyond ``cap``."""

    rows: int
    vocab: int
    cap: float
    seed: int


Recipe = Paged | Write | Linear | Sampling | Light | Experts | Routed | Capped
