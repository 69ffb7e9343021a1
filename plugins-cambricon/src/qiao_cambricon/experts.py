"""Mixtures of experts: routing, the products of all experts in one grouped call, and their sum.

``group_gemm`` reads one tensor [experts, O, I]. The weights of a layer are put together when the layer first runs, and
each weight is a view of that from then on, so nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from qiao.contract import PackedWeight, hookimpl

from qiao_cambricon import _sdk, rules
from qiao_cambricon.linear import Packed, matmul, quantized


@hookimpl
def route_experts(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``moe_softmax_topk``, which gives float32 weights and int32 experts."""
    weights, experts = _sdk.operation("moe_softmax_topk")(logits.contiguous(), top_k, normalize=normalise)
    return weights.to(logits.dtype), experts.long()


@hookimpl
def combine_experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``moe_combine_result`` over rows that already lie token by token."""
    rows = x.contiguous().flatten(0, 1)
    places = torch.arange(rows.shape[0], dtype=torch.int32, device=x.device)
    return _sdk.operation("moe_combine_result")(rows, weights.float().contiguous(), places, None, None, 0, 0)


@hookimpl
def expert_matmul(x: torch.Tensor, weights: Sequence[PackedWeight], experts: torch.Tensor) -> torch.Tensor:
    """Dense weights by ``group_gemm``, ``w8a8`` in 16 bits by ``smooth_quant_group_gemm``, others expert by expert.

    The last need to know on the host which experts were chosen, so that a graph cannot hold them.
    """
    rows, packed = x.contiguous(), cast("Sequence[Packed]", weights)
    if "weight" in packed[0].data:
        return _grouped(rows, packed, experts)
    if packed[0].scheme == "w8a8" and x.dtype in rules.HALVES:
        return _grouped_int8(rows, packed, experts)
    out = rows.new_empty(rows.shape[0], packed[0].info.out_features)
    chosen = experts.tolist()
    for expert in sorted(set(chosen)):
        mine = torch.tensor([i for i, e in enumerate(chosen) if e == expert], device=x.device)
        out.index_copy_(0, mine, matmul(rows.index_select(0, mine), packed[expert], None))
    return out


def _order(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows sorted by expert, where each went, and how many each expert has; int32, on the device."""
    expand, combine, counts, _ = _sdk.operation("moe_gen_idx")(rules.int32(experts)[:, None].contiguous(), count)
    return expand, combine, counts


def _grouped(x: torch.Tensor, weights: Sequence[Packed], experts: torch.Tensor) -> torch.Tensor:
    together = _together(weights, "weight", x.dtype)
    expand, combine, counts = _order(experts, len(weights))
    sorted_rows = _sdk.operation("group_gemm")(x, together, counts, expand, None, None, None, x.shape[0])
    return sorted_rows.index_select(0, combine)


def _grouped_int8(x: torch.Tensor, weights: Sequence[Packed], experts: torch.Tensor) -> torch.Tensor:
    codes, scales = _together(weights, "codes", torch.int8), _together(weights, "scale", torch.float32)
    expand, combine, counts = _order(experts, len(weights))
    a, a_scale = quantized(x.index_select(0, expand))
    sorted_rows = _sdk.operation("smooth_quant_group_gemm")(
        a, codes, counts, None, None, None, None, a_scale, scales, x.dtype, x.shape[0]
    )
    return sorted_rows.index_select(0, combine)


def _together(weights: Sequence[Packed], name: str, dtype: torch.dtype) -> torch.Tensor:
    """``data[name]`` of all weights as one tensor [X, ...] of ``dtype``, made once.

    Weights of another dtype than the activations stay beside it as they are.
    """
    made = weights[0].shared.get(name)
    if made is None or made.dtype != dtype:
        made = torch.stack([w.data[name] for w in weights]).to(dtype)
        for i, weight in enumerate(weights):
            weight.shared[name] = made
            if weight.data[name].dtype == dtype:
                cast("dict[str, torch.Tensor]", weight.data)[name] = made[i]
    return made
