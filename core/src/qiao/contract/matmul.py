"""Matmul family: linear layers by weight scheme. Group W[scheme]: packing and product move together.

Schemes and what ``pack_weight`` receives (all on the host or on the target device, plugin's choice to move):

``dense``  ``weight`` [O, I] floating
``w8a16``  ``weight`` [O, I] int8, ``scale`` [O, groups] floating, ``zero`` as ``scale`` where the format has one, and
           ``perm`` as below
``w8a8``   as ``w8a16`` with one group, without zero and perm; activations are quantized per token, symmetric, on the
           fly. Since 1.1 ``input_scale`` [1, 1] float32 may come with it, from a checkpoint with static scales: a value
           x then becomes ``clamp(round(x / input_scale), -128, 127) * input_scale``, ties to even. A plugin that only
           rounds per token leaves it out: that is the finer of the two
``w4a16``  ``weight`` [O, I] uint8 holding 0..15, ``scale`` and ``zero`` [O, groups] floating,
           and ``perm`` [I] int64 where GPTQ's act-order regrouped the columns (column j belongs to input ``perm[j]``)
``fp8``    ``weight`` [O, I] float8_e4m3fn, ``scale`` [O, 1] or [1, 1] float32

``groups`` is ``ceil(I / group_size)``, or 1 where ``group_size`` is -1: the last group may have fewer inputs than the
others. O and I may be odd. The value of a quantized weight is ``(weight - zero) * scale``; without ``zero`` it is
``weight * scale``. A plugin may round the activations of ``w4a16`` and ``w8a16`` on the fly; it then declares a
tolerance for that scheme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qiao.contract.markers import hookspec
from qiao.contract.types import PackedWeight, WeightInfo


class MatmulSpec:
    """Hooks that pack a weight once and multiply by it many times."""

    @hookspec
    def pack_weight(
        self, scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str
    ) -> PackedWeight:
        """The plugin's own form of a weight, on ``device``. Called once per weight at load."""
        raise NotImplementedError

    @hookspec
    def matmul(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, I] times the transposed weight plus ``bias`` [O]: [T, O] of ``x``'s dtype."""
        raise NotImplementedError

    @hookspec
    def expert_matmul(self, x: torch.Tensor, weights: Sequence[PackedWeight], experts: torch.Tensor) -> torch.Tensor:
        """Optional. Since 1.1. Row t of ``x`` [T, I] times the transposed weight ``experts[t]``: [T, O].

        ``weights`` are those of one layer's experts, all of one scheme and shape, without ``perm`` and ``input_scale``,
        the same sequence in each call; ``experts`` [T] int64 lies where they do. Nothing of it may be read on the host
        where the plugin captures: it is what makes a mixture of experts a fixed sequence of calls.
        """
        raise NotImplementedError
