"""Kernels of the simulated chip: written for reading, sequence by sequence and row by row, on the private payloads.

They share no code with the reference plugin, so agreement between the two means something.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from qiao_conformance.sim.device import SimTensor, wrap
from qiao_conformance.sim.state import NAME, STATE


def launch(hook: str, *tensors: torch.Tensor | None) -> int:
    """Count a kernel over ``tensors``, which must lie on one simulated device; returns its index.

    Raises ``RuntimeError`` for a host tensor or two devices, and whatever fault is waiting for ``hook.<name>``.
    """
    present = [t for t in tensors if t is not None]
    for tensor in present:
        if not isinstance(tensor, SimTensor):
            raise RuntimeError(f"{hook} on {NAME} got a tensor on {tensor.device}")
    indices = {t.device.index for t in present}
    if len(indices) != 1:
        raise RuntimeError(f"{hook} on {NAME} got tensors on devices {sorted(indices)}")
    (index,) = indices
    STATE.fire(f"hook.{hook}", index)
    STATE.launched(f"hook.{hook}")
    return index


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The payload, for kernels only."""
    assert isinstance(tensor, SimTensor)  # launch has checked
    return tensor._raw


def result(hook: str, payload: torch.Tensor, index: int) -> torch.Tensor:
    """A kernel's result as a device tensor; the knob for wrong numbers acts here."""
    error = STATE.wrong.get(hook) or STATE.wrong.get(f"hook.{hook}")
    if error and payload.is_floating_point():
        payload = payload * (1 + error)
    return wrap(payload, index)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int, soft_cap: float
) -> torch.Tensor:
    """One sequence: ``query`` [n, H, D] are its last n positions, ``key`` and ``value`` [L, K, D] all of them."""
    count, heads, _ = query.shape
    length, kv_heads, _ = key.shape
    key, value = (x.float().repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    scores = torch.einsum("nhd,lhd->hnl", query.float(), key) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(length - count, length)[:, None] - torch.arange(length)[None, :]
    hidden = distance < 0
    if window > 0:
        hidden = hidden | (distance >= window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, value).to(query.dtype)


def context(part: torch.Tensor, layout: str, table: torch.Tensor, length: int) -> torch.Tensor:
    """A sequence's vectors [L, K, D] from the blocks of its table."""
    size = part.shape[1] if layout == "NHD" else part.shape[2]
    blocks = part[table[: -(-length // size)].long()]
    if layout == "HND":
        blocks = blocks.transpose(1, 2)
    return blocks.flatten(0, 1)[:length]


def store(part: torch.Tensor, layout: str, new: torch.Tensor, slots: torch.Tensor) -> None:
    """Write ``new`` [T, K, D] at ``slots`` [T], leaving out -1."""
    size = part.shape[1] if layout == "NHD" else part.shape[2]
    used = slots >= 0
    block, offset, new = slots[used] // size, slots[used] % size, new[used].to(part.dtype)
    if layout == "NHD":
        part[block, offset] = new
    else:
        part[block, :, offset] = new


def dequantize(data: Mapping[str, torch.Tensor], columns: int, group_size: int) -> torch.Tensor:
    """``(weight - zero) * scale`` as float32 [O, I]."""
    value = data["weight"].float()
    groups = data["scale"].shape[1]
    size = columns if groups == 1 else (group_size if group_size > 0 else -(-columns // groups))
    group = torch.arange(columns) // size
    if "zero" in data:
        value = value - data["zero"].float()[:, group]
    return value * data["scale"].float()[:, group]


def product(
    scheme: str, x: torch.Tensor, data: Mapping[str, torch.Tensor], group_size: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x`` [T, I] by a packed weight, all payloads."""
    if scheme == "dense":
        return functional.linear(x, data["weight"].T, None if bias is None else bias.to(x.dtype))
    wide = x.float() if "perm" not in data else x.float()[:, data["perm"]]
    if scheme == "w8a8":
        largest = wide.abs().amax(dim=1, keepdim=True)
        step = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
        codes = torch.round(wide / step).clamp(-127, 127).to(torch.int32)
        if "input_scale" in data:
            step = data["input_scale"]
            codes = torch.round(wide / step).clamp(-128, 127).to(torch.int32)
        whole = codes.double() @ data["weight"].double().T  # integers below 2^53: exact
        out = (whole * step.double() * data["scale"].double().T).float()
    else:
        out = wide @ dequantize(data, x.shape[1], group_size).T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def draw(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """One row [V] by the text of ``SamplingSpec.sample``, over the sorted vocabulary in float64."""
    if not torch.isfinite(logits.max()):
        return int(logits.argmax())
    order = torch.argsort(logits, descending=True, stable=True)
    if temperature <= 0:
        return int(order[0])
    ranked = logits[order].double()
    chance = ((ranked - ranked[0]) / temperature).exp()
    if top_k > 0:
        chance = chance[:top_k]
    chance = chance / chance.sum()
    if top_p < 1:
        before = chance.cumsum(0) - chance
        chance = chance[: max(1, int((before < top_p).sum()))]
    chance = chance[chance >= min_p * chance[0]]
    mass = chance.cumsum(0)
    place = int((mass <= uniform * mass[-1]).sum())
    return int(order[min(place, int((chance > 0).sum()) - 1)])
