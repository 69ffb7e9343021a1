"""Frozen records that cross the line between core and plugins.

Letters in shapes, everywhere in the contract: T tokens of a step, B sequences of a step, N rows whose
logits are wanted, H query heads, K key/value heads, D head size, E hidden size, V vocabulary,
I and O a linear layer's input and output features, P block-table width, F feed-forward size, R rotated
dimensions of a head, X experts of a layer, A experts that a token is sent to.

Activations may be strided views (the parts of a fused projection): only the last dimension is sure to be contiguous.
Norm weights may be float32 beside half-precision activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

import torch

_EMPTY: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device that a plugin found on this machine.

    ``name`` is plugin name and index (``"acme:0"``); ``torch_device`` is what torch calls it; ``chip`` is the
    name to pass to ``capabilities``; ``auto`` takes the highest ``score``, and never a 0,
    which only serves when named; ``evidence`` is shown to the user, so it says what was seen (a device node, a
    driver version).
    """

    name: str
    torch_device: str
    chip: str
    score: int
    evidence: str
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Free and total bytes of a device, as its driver reports them."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a result may be from the float64 reference: ``|a - b| <= atol + rtol * |b|``."""

    atol: float
    rtol: float


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a chip supports, declared as data and read before anything is built.

    An empty ``block_sizes`` or ``head_dims`` means "any". ``dtypes`` and ``kv_dtypes`` are torch names without
    the prefix (``"bfloat16"``). ``kv_layouts`` is in order of preference: ``NHD`` is
    [blocks, block_size, K, D], ``HND`` is [blocks, K, block_size, D], ``NZ`` is the vendor's own. A cache of each
    of ``kv_dtypes`` (empty: ``dtypes``) works with activations of each of ``dtypes``. ``schemes``
    are the weight formats that ``matmul`` takes. ``tolerances`` loosens the catalog's by (hook, dtype), or for one
    weight format by (``"matmul." + scheme``, dtype), as where activations are rounded on the fly.
    ``capture_sizes`` are the numbers of sequences for which decode steps are recorded, at the start; a step is filled
    up to the next one. Empty means that any number is recorded when it first comes.
    ``packing`` names all that the bytes of packed weights depend on besides the weights (version, instruction set,
    settings): a device with the hook ``restore_weight`` takes back what was packed under the same name. Empty where
    packed weights cannot be kept.
    """

    dtypes: tuple[str, ...]
    kv_layouts: tuple[str, ...] = ("NHD",)
    kv_dtypes: tuple[str, ...] = ()
    block_sizes: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = ()
    schemes: tuple[str, ...] = ("dense",)
    sliding_window: bool = True
    soft_cap: bool = True
    sdk: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    tolerances: Mapping[tuple[str, str], Tolerance] = field(default_factory=lambda: _EMPTY)
    capture_sizes: tuple[int, ...] = ()
    packing: str = ""


@dataclass(frozen=True, slots=True)
class KVCache:
    """The paged cache of one layer.

    With layout ``NHD`` both tensors are [blocks, block_size, K, D]; with ``HND`` [blocks, K, block_size, D];
    with ``NZ`` only the plugin knows. Core never reads the tensors, it only hands them to hooks of the same group.

    An int8 cache holds for each token and key head D codes and one float32 scale, in ``key_scale`` and ``value_scale``
    of the same shape without D: ``scale = max|x| / 127`` and ``code = x / scale`` in float32, rounded to the nearest,
    ties to even, and limited to -127..127; the vector stands for ``code * scale``. Where all of x is 0 so is the scale;
    where some of x is not finite the scale is NaN, so that a bad vector spoils what reads it and nothing else.
    """

    key: torch.Tensor
    value: torch.Tensor
    block_size: int
    layout: str
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


class UnreadLengths(tuple[int, ...]):
    """``kv_lens`` inside a captured region: they change from step to step, and a program would keep what it read.

    Whatever reads it raises ``NotImplementedError``, so that the region is not captured.
    """

    def _refuse(self, *args: object) -> NoReturn:
        raise NotImplementedError("an operator reads kv_lens on the host, which a recorded program cannot follow")

    __iter__ = __getitem__ = __len__ = __contains__ = __eq__ = __hash__ = __add__ = _refuse
    count = index = _refuse


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The ragged batch of one step. Tensors lie where the KV cache lies.

    ``query_start`` [B+1] int32: row offsets of each sequence in the packed queries. ``seq_lens`` [B] int32:
    cached tokens plus this step's. ``block_tables`` [B, P] int32, rows padded with 0. ``slot_mapping`` [T] int64:
    ``block * block_size + offset`` of each new token, -1 for padding. The query at row j of sequence i has position
    ``seq_lens[i] - (query_start[i+1] - query_start[i]) + j`` and sees keys at positions up to its own.
    ``query_lens``/``kv_lens`` are the same numbers on the host, for planning without a device read.
    ``plan`` is what ``prepare_attention`` returned, or None.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    plan: Any = None

    @property
    def decode_only(self) -> bool:
        """Whether every sequence has exactly one new token."""
        return all(n == 1 for n in self.query_lens)


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Per-row sampling settings, each [N], on the device that samples.

    ``temperature`` float32, 0 means greedy; ``top_k`` int32, 0 means off; ``top_p`` and ``min_p`` float32, 1 and 0
    mean off; ``uniform`` float32 in [0, 1): the row's random number of this step. One number suffices because
    sampling inverts the cumulative distribution taken in order of falling probability (ties: lower id first), so
    each device draws the same token. The flags say on the host which work can be left out.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


@dataclass(frozen=True, slots=True)
class PenaltyTensors:
    """Per-row penalties: ``prompt_ids`` and ``output_ids`` [N, any] int64, padded with V; the rest [N] float32."""

    prompt_ids: torch.Tensor
    output_ids: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogprobOutput:
    """``chosen`` [N] float32, ``rank`` [N] int64 from 1, ``top_ids`` [N, k] int64, ``top_values`` [N, k] float32."""

    chosen: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """The facts of one linear weight that its tensors do not show. ``group_size`` -1 means one group a row."""

    name: str
    in_features: int
    out_features: int
    bits: int = 16
    group_size: int = -1
    symmetric: bool = True


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in the plugin's own form. Core passes it to ``matmul`` of the same group and reads only ``nbytes``."""

    scheme: str
    info: WeightInfo
    data: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.numel() * t.element_size() for t in self.data.values())
