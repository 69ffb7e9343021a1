"""Mixtures of experts."""

from __future__ import annotations

import torch
from qiao_conformance.sim import kernels
from torch_mlu.graphs import operation

from torch_mlu_ops._rules import HALVES, ask, enter, index32, int32, same_dtype

Tensor = torch.Tensor


@operation
def moe_softmax_topk(
    input: Tensor,
    topk: int,
    normalize: bool = False,
    num_expert_group: int = -1,
    topk_group: int = 0,
    mask: Tensor | None = None,
    normed_by: str = "topk_logit",
) -> tuple[Tensor, Tensor]:
    """(float32 weights, int32 experts) of each row, in falling order."""
    index = enter("moe_softmax_topk", input)
    same_dtype("moe_softmax_topk", input)
    ask(mask is None and num_expert_group == -1 and normed_by == "topk_logit", "moe_softmax_topk: not in the stand-in")
    ask(0 < topk <= input.shape[-1], "moe_softmax_topk: topk of the experts")
    weights, experts = torch.softmax(kernels.raw(input).float(), -1).topk(topk, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    return kernels.wrap(weights, index), index32(experts, index)


@operation
def moe_gen_idx(expert_id: Tensor, expert_num: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """expert_id [tokens, topk]: (token of each row sorted by expert, place of each row, rows of each expert, sums)."""
    index = enter("moe_gen_idx", expert_id)
    int32("moe_gen_idx", expert_id)
    ask(expert_id.dim() == 2, "moe_gen_idx: expert_id is [tokens, topk]")
    chosen = kernels.raw(expert_id).flatten().long()
    ask(int(chosen.min()) >= 0 and int(chosen.max()) < expert_num, "moe_gen_idx: no such expert")
    order = torch.argsort(chosen, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    counts = torch.bincount(chosen, minlength=expert_num)
    sums = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return tuple(index32(x, index) for x in (order // expert_id.shape[1], place, counts, sums))


@operation
def group_gemm(
    a: Tensor,
    b: Tensor,
    m_list: Tensor,
    expand_idx: Tensor | None,
    c: Tensor | None,
    alpha: Tensor | None,
    beta: Tensor | None,
    max_m: int = 0,
) -> Tensor:
    """Rows sorted by expert times that expert's b [experts, n, k]; expand_idx says which rows of a these are."""
    name = "group_gemm"
    index = enter(name, a, b, m_list, expand_idx)
    same_dtype(name, a, b)
    int32(name, m_list, expand_idx)
    ask(c is None and alpha is None and beta is None, f"{name}: not in the stand-in")
    rows = kernels.raw(a) if expand_idx is None else kernels.raw(a)[kernels.raw(expand_idx).long()]
    counts = _counts(name, m_list, b, rows, max_m)
    parts = [x.float() @ kernels.raw(b)[i].float().T for i, x in enumerate(rows.split(counts))]
    return kernels.result(f"tmo.{name}", torch.cat(parts).to(a.dtype), index)


def _counts(name: str, m_list: Tensor, b: Tensor, rows: Tensor, max_m: int) -> list[int]:
    counts = kernels.raw(m_list).tolist()
    ask(len(counts) == b.shape[0] and b.dim() == 3, f"{name}: b is [experts, n, k]")
    ask(sum(counts) == len(rows) and b.shape[2] == rows.shape[1], f"{name}: counts add up to the rows")
    ask(max_m >= max(counts), f"{name}: max_m is no less than any count")
    return counts


@operation
def smooth_quant_group_gemm(
    a: Tensor,
    b: Tensor,
    m_list: Tensor,
    expand_idx: Tensor | None,
    c: Tensor | None,
    alpha: Tensor | None,
    beta: Tensor | None,
    a_scale: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    max_m: int = 0,
) -> Tensor:
    """The same in int8, with scales a_scale [rows] and b_scale [experts, n]; results in 16 bits only."""
    name = "smooth_quant_group_gemm"
    index = enter(name, a, b, m_list, a_scale, b_scale)
    ask(a.dtype == b.dtype == torch.int8, f"{name}: a and b are int8")
    ask(a_scale.dtype == b_scale.dtype == torch.float32, f"{name}: scales are float32")
    ask(dtype in HALVES, f"{name}: results are float16 or bfloat16")
    int32(name, m_list)
    ask(expand_idx is None and c is None and alpha is None and beta is None, f"{name}: not in the stand-in")
    ask(a_scale.shape == a.shape[:1] and b_scale.shape == b.shape[:2], f"{name}: one scale a row")
    counts = _counts(name, m_list, b, a, max_m)
    parts = []
    for i, (rows, steps) in enumerate(
        zip(kernels.raw(a).split(counts), kernels.raw(a_scale).split(counts), strict=True)
    ):
        whole = rows.double() @ kernels.raw(b)[i].double().T
        parts.append(whole * steps.double()[:, None] * kernels.raw(b_scale)[i].double())
    return kernels.result(f"tmo.{name}", torch.cat(parts).to(dtype), index)


@operation
def moe_combine_result(
    input: Tensor,
    reduce_weight: Tensor,
    gather_ids: Tensor,
    residual: Tensor | None,
    cusum_token_count: Tensor | None,
    start_expert_id: int,
    expert_size: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Rows gather_ids of input, summed by the weights [tokens, topk]."""
    name = "moe_combine_result"
    index = enter(name, input, reduce_weight, gather_ids)
    same_dtype(name, input)
    int32(name, gather_ids)
    ask(reduce_weight.dtype == torch.float32, f"{name}: weights are float32")
    ask(residual is None and cusum_token_count is None and bias is None, f"{name}: not in the stand-in")
    weights = kernels.raw(reduce_weight)
    rows = kernels.raw(input)[kernels.raw(gather_ids).long()].view(*weights.shape, -1)
    return kernels.result(f"tmo.{name}", (rows.float() * weights[..., None]).sum(1).to(input.dtype), index)
