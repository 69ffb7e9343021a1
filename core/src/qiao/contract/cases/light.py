"""Cases of the fused family: odd sizes, partial and interleaved rotation."""

from __future__ import annotations

import itertools

import torch

from qiao.contract.cases.base import Made, Random
from qiao.contract.cases.paged import write_kv
from qiao.contract.types import Capabilities


def _norms(capabilities: Capabilities, random: Random, names: tuple[str, ...]) -> Made:
    for dtype, (tokens, size) in itertools.product(capabilities.dtypes, ((1, 32), (5, 33), (3, 256))):
        arguments = {n: random.normal(tokens, size, dtype=dtype) for n in names}
        arguments["weight"] = random.normal(size, dtype=dtype)
        yield f"{tokens}x{size}", dtype, {**arguments, "eps": 1e-5}, "sums in float32"


def rms_norm(capabilities: Capabilities, random: Random) -> Made:
    """Even and odd sizes."""
    yield from _norms(capabilities, random, ("x",))


def add_rms_norm(capabilities: Capabilities, random: Random) -> Made:
    """Even and odd sizes."""
    yield from _norms(capabilities, random, ("x", "residual"))


def gated(capabilities: Capabilities, random: Random) -> Made:
    """For ``silu_mul`` and ``gelu_mul``."""
    for dtype, (tokens, size) in itertools.product(capabilities.dtypes, ((1, 16), (5, 33))):
        yield f"{tokens}x{size}", dtype, {"x": random.normal(tokens, 2 * size, dtype=dtype)}, "gate first, then up"


def cap_logits(capabilities: Capabilities, random: Random) -> Made:
    """Logits far below the cap, around it and far above."""
    for (rows, vocab), cap in itertools.product(((1, 32), (5, 131)), (30.0, 2.0)):
        logits = random.normal(rows, vocab) * 20
        logits[0, :3] = torch.tensor([0.0, 1e4, -1e4])
        yield f"{rows}x{vocab}-{cap:g}", "float32", {"logits": logits, "cap": cap}, "never beyond the cap"


def route_experts(capabilities: Capabilities, random: Random) -> Made:
    """Few and many experts; no two logits of a row are equal, so that the choice is one."""
    sizes = ((1, 4, 1), (5, 8, 2), (3, 60, 8))
    for dtype, (tokens, experts, top_k), normalise in itertools.product(capabilities.dtypes, sizes, (False, True)):
        steps = torch.stack([random.order(experts) for _ in range(tokens)]) - experts / 2
        arguments = {"logits": (steps / 8).to(getattr(torch, dtype)), "top_k": top_k, "normalise": normalise}
        label = f"{top_k}of{experts}-{tokens}tokens" + "-normalised" * normalise
        yield label, dtype, arguments, "in falling order of the weights"


def combine_experts(capabilities: Capabilities, random: Random) -> Made:
    """One and several experts a token, even and odd sizes."""
    for dtype, (tokens, chosen, size) in itertools.product(capabilities.dtypes, ((1, 1, 32), (5, 2, 33), (3, 8, 64))):
        x = random.normal(tokens, chosen, size, dtype=dtype)
        weights = random.uniform(tokens, chosen).to(getattr(torch, dtype)) / chosen
        yield f"{tokens}x{chosen}x{size}", dtype, {"x": x, "weights": weights}, "sums in float32"


def _angles(random: Random, tokens: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = random.uniform(tokens, pairs) * 6.28
    return angle.cos(), angle.sin()


def rotary(capabilities: Capabilities, random: Random) -> Made:
    """Whole and partial rotation, both pairings."""
    dim = (capabilities.head_dims or (16,))[0]
    variants = itertools.product(capabilities.dtypes, ((1, 2, 2), (5, 4, 1)), (dim, dim // 2), (False, True))
    for dtype, (tokens, heads, kv_heads), rotated, interleaved in variants:
        query, key = (random.normal(tokens, n, dim, dtype=dtype) for n in (heads, kv_heads))
        cos, sin = _angles(random, tokens, rotated // 2)
        arguments = {"query": query, "key": key, "cos": cos, "sin": sin, "interleaved": interleaved}
        label = f"{tokens}tokens-{rotated}of{dim}-{'interleaved' if interleaved else 'halves'}"
        yield label, dtype, arguments, "the dimensions past R stay"


def rope_write_kv(capabilities: Capabilities, random: Random) -> Made:
    """The cases of ``write_kv`` with a rotation before.

    Only with a cache of the activations' own dtype: elsewhere the last bit of a rotated key may round it either way.
    """
    for label, dtype, stored, _ in write_kv(capabilities, random):
        if stored["cache"].dtype != dtype:
            continue
        tokens, heads, dim = stored["key"].shape
        cos, sin = _angles(random, tokens, dim // 2)
        arguments = {"query": random.normal(tokens, 2 * heads, dim, dtype=dtype), "key": stored["key"]}
        arguments |= {"value": stored["value"], "cos": cos, "sin": sin, "interleaved": False}
        arguments |= {"cache": stored["cache"], "slot_mapping": stored["slot_mapping"]}
        yield label, dtype, arguments, "the rotated key is stored, the value as it is"
