"""The rotary part of a config in all its spellings, resolved into ``RopeSpec``.

Older files hold ``rope_theta`` and ``rope_scaling`` (key ``type`` or ``rope_type``); transformers 5 writes one
``rope_parameters`` block, or one for each layer type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qiao.layers.rotary import KINDS, RopeSpec
from qiao.models.settings import Settings

_ALIASES = {"su": "longrope", "ntk": "dynamic"}
_NEEDS_FACTOR = ("linear", "dynamic", "llama3", "yarn")
_LENGTHENS = ("linear", "dynamic", "yarn")
"""Kinds whose factor multiplies the context, as vLLM reads them."""


def rope_spec(
    settings: Settings,
    head_dim: int,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    layer_type: str | None = None,
) -> RopeSpec:
    """The rotary embedding of layers of ``layer_type``; ``theta`` and ``partial`` are the family's defaults.

    Raises ``ModelError`` for an unknown or contradictory kind and for a missing field of the kind.
    """
    block = _Block(settings, layer_type)
    kind = block.kind()
    share = block.number("partial_rotary_factor", settings.number("partial_rotary_factor", partial))
    size = int(head_dim * share)
    if size < 2 or size % 2 or size > head_dim:
        raise settings.error(
            "partial_rotary_factor", f"{share} of head_dim {head_dim} rotates {size} dimensions, which must be even"
        )
    base = block.number("rope_theta", settings.number("rope_theta", theta))
    spec = RopeSpec(kind, base, size, interleaved)
    if kind == "default":
        return spec
    spec = replace(spec, trained_length=_trained_length(settings, block, kind))
    if kind in _NEEDS_FACTOR:
        spec = replace(spec, factor=block.positive("factor"))
    if kind == "llama3":
        return _with_llama3(spec, block)
    if kind == "yarn":
        return _with_yarn(spec, block)
    if kind == "longrope":
        return _with_longrope(spec, block, settings)
    return spec


def context_length(settings: Settings, spec: RopeSpec | None, field: str = "max_position_embeddings") -> int:
    """Tokens that the model can read, the extension by its rope included (vLLM's rule)."""
    length = settings.integer(field)
    if spec is None or spec.kind not in _LENGTHENS:
        return length
    return max(length, int(spec.factor * spec.trained_length))


class _Block:
    """The one dict that speaks about rope for a layer type."""

    def __init__(self, settings: Settings, layer_type: str | None) -> None:
        self.settings = settings
        self.field = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"
        found = settings.get(self.field, {})
        if isinstance(found, Mapping) and layer_type is not None and isinstance(found.get(layer_type), Mapping):
            self.field, found = f"{self.field}.{layer_type}", found[layer_type]
        if not isinstance(found, Mapping):
            raise settings.error(self.field, f"must be an object or null, got {found!r}")
        self.values: Mapping[str, Any] = found

    def kind(self) -> str:
        new, old = self.values.get("rope_type"), self.values.get("type")
        if new is not None and old is not None and _canonical(new) != _canonical(old):
            raise self.settings.error(self.field, f"has rope_type {new!r} and type {old!r}; keep one of them")
        kind = _canonical(new if new is not None else old)
        if kind == "yarn" and "long_factor" in self.values:
            kind = "longrope"  # early Phi-3 files call it so
        if kind not in KINDS:
            raise self.settings.error(self.field, f"has the unknown rope type {kind!r}; known are {', '.join(KINDS)}")
        if kind == "default" and new is None and old is None and "factor" in self.values:
            raise self.settings.error(self.field, "has a factor but no rope_type; add one, for example linear")
        return kind

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.settings.error(f"{self.field}.{name}", "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.settings.error(f"{self.field}.{name}", f"must be a number, got {value!r}")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self.settings.error(f"{self.field}.{name}", f"must be above 0, got {value}")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        value = self.values.get(name)
        if not isinstance(value, list | tuple) or not all(isinstance(x, int | float) for x in value):
            raise self.settings.error(f"{self.field}.{name}", "must be a list of numbers")
        if len(value) != length:
            raise self.settings.error(f"{self.field}.{name}", f"must have {length} entries, has {len(value)}")
        return tuple(float(x) for x in value)


def _canonical(kind: Any) -> str:
    return "default" if kind is None else _ALIASES.get(str(kind), str(kind))


def _trained_length(settings: Settings, block: _Block, kind: str) -> int:
    full = settings.integer("max_position_embeddings")
    if kind in ("linear", "dynamic"):
        return full
    # Phi-3 keeps the trained length beside the block, and transformers lets it win.
    outside = settings.get("original_max_position_embeddings")
    return int(outside) if outside else int(block.positive("original_max_position_embeddings", full))


def _with_llama3(spec: RopeSpec, block: _Block) -> RopeSpec:
    low, high = block.positive("low_freq_factor"), block.positive("high_freq_factor")
    if low == high:
        raise block.settings.error(f"{block.field}.high_freq_factor", "must differ from low_freq_factor")
    return replace(spec, low_freq_factor=low, high_freq_factor=high)


def _with_yarn(spec: RopeSpec, block: _Block) -> RopeSpec:
    attention = block.values.get("attention_factor")
    if attention is None:
        all_dims, mscale = block.number("mscale_all_dim", 0.0), block.number("mscale", 0.0)
        if mscale and all_dims:
            attention = _yarn_scale(spec.factor, mscale) / _yarn_scale(spec.factor, all_dims)
        else:
            attention = _yarn_scale(spec.factor, 1.0)
    truncate = block.values.get("truncate")
    return replace(
        spec,
        attention_factor=float(attention),
        beta_fast=block.number("beta_fast", 0.0) or 32.0,
        beta_slow=block.number("beta_slow", 0.0) or 1.0,
        truncate=True if truncate is None else bool(truncate),
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    """YaRN (arXiv 2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _with_longrope(spec: RopeSpec, block: _Block, settings: Settings) -> RopeSpec:
    """LongRoPE as Phi-3 uses it: the score scale follows from how far the context was extended."""
    attention = block.values.get("attention_factor")
    if attention is None:
        extended = settings.integer("max_position_embeddings") / spec.trained_length
        factor = block.number("factor", extended)
        attention = math.sqrt(1 + math.log(factor) / math.log(spec.trained_length)) if factor > 1 else 1.0
    return replace(
        spec,
        attention_factor=float(attention),
        short_factor=block.numbers("short_factor", spec.size // 2),
        long_factor=block.numbers("long_factor", spec.size // 2),
    )
