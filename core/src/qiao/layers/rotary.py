"""Rotary position embeddings: every kind in use, as tables that a step indexes once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One kind of rotary embedding, fully resolved from a config.

    ``size`` R dimensions of each head turn, in pairs (i, i + R/2), or (2i, 2i + 1) where ``interleaved``.
    ``attention_factor`` multiplies cos and sin. ``trained_length`` is the context in tokens that the model was trained
    with before the extension. The other fields belong to the kind that reads them.
    """

    kind: str
    theta: float
    size: int
    interleaved: bool = False
    factor: float = 1.0
    attention_factor: float = 1.0
    trained_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""The kinds that ``inverse_frequencies`` knows."""


def inverse_frequencies(spec: RopeSpec, length: int) -> torch.Tensor:
    """Angle per position of each pair [R/2] float32, for a server whose longest sequence is ``length`` tokens.

    ``dynamic`` and ``longrope`` depend on the length. transformers takes the longest sequence of each batch, which
    rotates the keys of one sequence by different rules as it grows; with a shared, cached prefix that is wrong. Here,
    as in vLLM, the longest length that is served decides once for all: up to ``trained_length`` both are exactly the
    model's plain form, beyond it exactly what transformers computes for one sequence of ``length`` tokens.
    """
    spec = _at_length(spec, length)
    exponents = torch.arange(0, spec.size, 2, dtype=torch.int64).float() / spec.size
    powers = spec.theta**exponents
    if spec.kind == "longrope":
        factors = spec.long_factor if length > spec.trained_length else spec.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
    plain = 1.0 / powers
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain)
    return plain


def _at_length(spec: RopeSpec, length: int) -> RopeSpec:
    """Dynamic NTK (reported by bloc97 and emozilla; as in transformers): a larger base for a longer context."""
    if spec.kind != "dynamic" or length <= spec.trained_length:
        return spec
    stretch = spec.factor * length / spec.trained_length - (spec.factor - 1)
    return replace(spec, theta=spec.theta * stretch ** (spec.size / (spec.size - 2)))


def _llama3(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by ``factor``, short ones kept, those between blended."""
    turns = spec.trained_length * plain / (2 * math.pi)
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / spec.factor + blend * plain


def _yarn(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over dimensions between interpolation and extrapolation."""

    def dimension(turns: float) -> float:
        return spec.size * math.log(spec.trained_length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(spec.size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / spec.factor * ramp + plain * (1 - ramp)


class RotaryTable:
    """cos and sin [length, R/2] float32 of every position, on ``device``. Never changed after construction."""

    def __init__(self, spec: RopeSpec, length: int, device: str) -> None:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(spec, length)
        self._cos = (angles.cos() * spec.attention_factor).to(device)
        self._sin = (angles.sin() * spec.attention_factor).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, R/2] of ``positions`` [T] int64."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
