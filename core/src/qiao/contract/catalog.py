"""The catalog: one declaration per hook, from which plan, fallback, conformance kit and documents are derived.

An operand's ``shape`` uses the letters of ``qiao.contract.types``. Its ``place`` says what a fallback does with it:

``move``   an activation on the compute device: copied to the host before, or back after, a host call
``state``  belongs to the operator's group and already lies where the operator runs
``host``   a plain value, or a tensor that its maker already put where the group runs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from qiao.contract.types import Tolerance

Place = Literal["move", "state", "host"]

ACTIVATION = "activation"
"""Stands for the model's own dtype."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One argument or result. ``dtype`` is a torch name or ``ACTIVATION``; both are empty for plain values."""

    name: str
    place: Place
    shape: str = ""
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One hook.

    ``group`` is what it moves with: ``KV``, ``W`` (per scheme), ``S``, or ``""`` for hooks that never move.
    ``optional`` hooks have a sequence in ``composites`` (``replaces``) or are simply not used when absent.
    ``mutates`` names the arguments that may change. ``per`` says how often a step calls it: ``attention`` layers,
    ``linear`` layers, ``step``, ``light`` (see ``ModelShape.fused_calls``) or ``start``.
    """

    name: str
    family: str
    group: str
    args: tuple[Operand, ...]
    results: tuple[Operand, ...] = ()
    mutates: tuple[str, ...] = ()
    optional: bool = False
    replaces: str = ""
    per: str = "start"
    tolerance: Mapping[str, Tolerance] = field(default_factory=dict)


_EXACT = MappingProxyType({t: Tolerance(0.0, 0.0) for t in ("float32", "float16", "bfloat16", "int64")})
_ARITHMETIC = MappingProxyType(
    {"float32": Tolerance(1e-5, 1e-5), "float16": Tolerance(2e-3, 2e-3), "bfloat16": Tolerance(1.6e-2, 1.6e-2)}
)
_PRODUCT = MappingProxyType(
    {"float32": Tolerance(1e-4, 1e-4), "float16": Tolerance(4e-3, 4e-3), "bfloat16": Tolerance(3e-2, 3e-2)}
)


def _plain(*names: str) -> tuple[Operand, ...]:
    return tuple(Operand(n, "host") for n in names)


def _move(name: str, shape: str, dtype: str = ACTIVATION) -> Operand:
    return Operand(name, "move", shape, dtype)


def _state(name: str) -> Operand:
    return Operand(name, "state")


_ATTENTION_ARGS = (
    _move("query", "T H D"),
    _state("cache"),
    _state("metadata"),
    *_plain("scale", "sliding_window", "soft_cap"),
)

_DEVICE = (
    OpSpec("probe_devices", "device", "", ()),
    OpSpec("capabilities", "device", "", _plain("chip")),
    OpSpec("memory_info", "device", "", _plain("device")),
    OpSpec("synchronize", "device", "", _plain("device")),
    OpSpec("utilization", "device", "", _plain("device"), optional=True),
    OpSpec("capture", "device", "", _plain("function", "example", "device"), optional=True),
    OpSpec("set_threads", "device", "", _plain("count"), optional=True),
    OpSpec("restore_weight", "device", "", _plain("scheme", "tensors", "info", "device"), optional=True),
    OpSpec("collective_backend", "device", "", (), optional=True),
)

_KV = (
    OpSpec(
        "allocate_kv",
        "allocation",
        "KV",
        _plain("num_blocks", "block_size", "num_kv_heads", "head_dim", "dtype", "layout", "device"),
        tolerance=_EXACT,
    ),
    OpSpec(
        "copy_blocks",
        "allocation",
        "KV",
        (_state("cache"), _state("source"), _state("target")),
        mutates=("cache",),
        tolerance=_EXACT,
    ),
    OpSpec(
        "swap_blocks",
        "allocation",
        "KV",
        (_state("source_cache"), _state("target_cache"), *_plain("source", "target")),
        mutates=("target_cache",),
        optional=True,
        tolerance=_EXACT,
    ),
    OpSpec(
        "write_kv",
        "attention",
        "KV",
        (_move("key", "T K D"), _move("value", "T K D"), _state("cache"), _state("slot_mapping")),
        mutates=("cache",),
        per="attention",
        tolerance=_EXACT,
    ),
    OpSpec(
        "attention",
        "attention",
        "KV",
        _ATTENTION_ARGS,
        (_move("output", "T H D"),),
        per="attention",
        tolerance=_PRODUCT,
    ),
    OpSpec(
        "decode_attention",
        "attention",
        "KV",
        _ATTENTION_ARGS,
        (_move("output", "T H D"),),
        optional=True,
        replaces="attention",
        tolerance=_PRODUCT,
    ),
    OpSpec(
        "prepare_attention",
        "attention",
        "KV",
        (_state("metadata"), *_plain("num_heads", "num_kv_heads", "head_dim", "block_size")),
        optional=True,
    ),
)

_W = (
    OpSpec("pack_weight", "matmul", "W", _plain("scheme", "tensors", "info", "device"), tolerance=_EXACT),
    OpSpec(
        "matmul",
        "matmul",
        "W",
        (_move("x", "T I"), _state("weight"), _state("bias")),
        (_move("output", "T O"),),
        per="linear",
        tolerance=_PRODUCT,
    ),
    OpSpec(
        "expert_matmul",
        "matmul",
        "W",
        (_move("x", "T I"), _state("weights"), _state("experts")),
        (_move("output", "T O"),),
        optional=True,
        replaces="matmul",
        tolerance=_PRODUCT,
    ),
)

_S = (
    OpSpec(
        "sample",
        "sampling",
        "S",
        (_move("logits", "N V", "float32"), _state("params")),
        (Operand("token_ids", "host", "N", "int64"),),
        per="step",
        tolerance=_EXACT,
    ),
    OpSpec(
        "apply_penalties",
        "sampling",
        "S",
        (_state("logits"), _state("params")),
        (_state("logits"),),
        mutates=("logits",),
        optional=True,
        replaces="apply_penalties",
        tolerance=_ARITHMETIC,
    ),
    OpSpec(
        "logprobs",
        "sampling",
        "S",
        (_state("logits"), _state("token_ids"), *_plain("top")),
        (_state("output"),),
        optional=True,
        replaces="logprobs",
        tolerance=_ARITHMETIC,
    ),
)


def _light(name: str, args: tuple[Operand, ...], results: tuple[Operand, ...], mutates: tuple[str, ...] = ()) -> OpSpec:
    return OpSpec(
        name, "fused", "", args, results, mutates, optional=True, replaces=name, per="light", tolerance=_ARITHMETIC
    )


_FUSED = (
    _light("rms_norm", (_move("x", "T E"), _state("weight"), *_plain("eps")), (_move("output", "T E"),)),
    _light(
        "add_rms_norm",
        (_move("x", "T E"), _move("residual", "T E"), _state("weight"), *_plain("eps")),
        (_move("normed", "T E"), _move("total", "T E")),
        ("x", "residual"),
    ),
    _light(
        "rotary",
        (
            _move("query", "T H D"),
            _move("key", "T K D"),
            _move("cos", "T R/2", "float32"),
            _move("sin", "T R/2", "float32"),
            *_plain("interleaved"),
        ),
        (_move("query", "T H D"), _move("key", "T K D")),
        ("query", "key"),
    ),
    _light("silu_mul", (_move("x", "T 2F"),), (_move("output", "T F"),)),
    _light("gelu_mul", (_move("x", "T 2F"),), (_move("output", "T F"),)),
    _light(
        "cap_logits",
        (_move("logits", "N V", "float32"), *_plain("cap")),
        (_move("output", "N V", "float32"),),
        ("logits",),
    ),
    _light(
        "route_experts",
        (_move("logits", "T X"), *_plain("top_k", "normalise")),
        (_move("weights", "T A"), _move("experts", "T A", "int64")),
    ),
    _light("combine_experts", (_move("x", "T A E"), _move("weights", "T A")), (_move("output", "T E"),)),
    OpSpec(
        "rope_write_kv",
        "fused",
        "KV",
        (
            _move("query", "T H D"),
            _move("key", "T K D"),
            _move("value", "T K D"),
            _move("cos", "T R/2", "float32"),
            _move("sin", "T R/2", "float32"),
            *_plain("interleaved"),
            _state("cache"),
            _state("slot_mapping"),
        ),
        (_move("query", "T H D"),),
        ("query", "key", "cache"),
        optional=True,
        replaces="rotary, write_kv",
        tolerance=_ARITHMETIC,
    ),
)

CATALOG: Mapping[str, OpSpec] = MappingProxyType({op.name: op for op in (*_DEVICE, *_KV, *_W, *_S, *_FUSED)})
"""Every hook of the contract by name."""

GROUPS: tuple[str, ...] = ("KV", "W", "S")
"""Placement groups; ``W`` stands for one group per scheme, written ``W[dense]``."""
