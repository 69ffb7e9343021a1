"""How long a hook takes on arguments of a real model's size, and what it moves in that time.

Numbers to compare on one machine; nothing passes or fails by them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from qiao.contract import CATALOG, Capabilities, PackedWeight
from qiao.contract.cases import Case, LooseCache, LooseWeight

from qiao_conformance import drawn
from qiao_conformance.target import Target

SECONDS = 0.3
"""Spent on one case, after one call to warm up."""

MOST_CALLS = 200


@dataclass(frozen=True)
class Measured:
    """Median ``microseconds`` of ``calls``; ``bytes`` of all operands and results, each counted once a call."""

    case: str
    hook: str
    dtype: str
    microseconds: float
    bytes: int
    bytes_per_second: float
    calls: int


def cases(hook: str, facts: Capabilities) -> Iterator[Case]:
    """The cases of ``hook`` to measure: layers of an 8B model, decoding 16 sequences and reading one prompt."""
    for label, recipe in _recipes(hook, facts):
        case = drawn.build(hook, recipe)
        yield Case(hook, f"{hook}-{label}-{case.dtype}", case.dtype, case.arguments, case.note)


def _recipes(hook: str, facts: Capabilities) -> Iterator[tuple[str, drawn.Recipe]]:
    dtype = "bfloat16" if "bfloat16" in facts.dtypes else facts.dtypes[0]
    if hook == "matmul":
        for scheme in facts.schemes:
            group = (128, 32) if scheme in ("w4a16", "w8a16") else (4096, 1)
            for tokens in (1, 32):
                yield (
                    f"{scheme}-4096x4096-{tokens}tokens",
                    drawn.Linear(dtype, scheme, tokens, 4096, group[1], group[0], 0, "", False, 0),
                )
    elif hook in ("attention", "decode_attention", "write_kv", "rope_write_kv"):
        batches = {"16x1024": ((1, 1024),) * 16}
        if hook == "attention":
            batches["512-prompt"] = ((512, 512),)
        for label, sequences in batches.items():
            cache = _cache(facts, dtype, sequences)
            yield label, cache if "attention" in hook else drawn.Write(cache, 16, 0)
    elif hook in ("sample", "apply_penalties", "logprobs"):
        yield "16x32000", drawn.Sampling(32_000, ((0.8, 40, 0.95, 0.0),) * 16, False, 0)
    elif hook == "cap_logits":
        yield "16x32000", drawn.Capped(16, 32_000, 30.0, 0)
    elif hook in ("expert_matmul", "route_experts", "combine_experts"):
        yield from _of_experts(hook, facts, dtype)
    elif drawn.recipes(hook, facts) is not None:
        size = {"rotary": 128, "silu_mul": 14_336, "gelu_mul": 14_336}.get(hook, 4096)
        yield f"16x{size}", drawn.Light(dtype, 16, size, 8, 64, False, 0)


def _of_experts(hook: str, facts: Capabilities, dtype: str) -> Iterator[tuple[str, drawn.Recipe]]:
    """Eight experts of 1024 rows, two for each of 16 tokens; small enough to be made in a moment."""
    if hook != "expert_matmul":
        yield "16x8-of-64", drawn.Routed(dtype, 16, 64, 8, 4096, True, 0)
        return
    for scheme in facts.schemes:
        group = (128, 16) if scheme in ("w4a16", "w8a16") else (2048, 1)
        weight = drawn.Linear(dtype, scheme, 0, 1024, group[1], group[0], 0, "", False, 0)
        yield f"{scheme}-8x1024x2048-32rows", drawn.Experts(weight, 8, tuple(i % 8 for i in range(32)))


def _cache(facts: Capabilities, dtype: str, sequences: tuple[tuple[int, int], ...]) -> drawn.Paged:
    dim = 128 if not facts.head_dims or 128 in facts.head_dims else facts.head_dims[-1]
    block = 16 if not facts.block_sizes or 16 in facts.block_sizes else facts.block_sizes[0]
    kept = dtype if dtype in (facts.kv_dtypes or facts.dtypes) else facts.kv_dtypes[0]
    return drawn.Paged(dtype, kept, facts.kv_layouts[0], block, dim, 8, 4, sequences, 0, 0.0, 1, 0)


def measure(target: Target, case: Case) -> Measured:
    """Call until ``SECONDS`` are spent, waiting for the device after each call."""
    arguments = target.placed(case)
    result = target.call(case.hook, arguments)
    moved = size_of(arguments, case) + size_of(result, case)
    taken: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(taken) < 3 or (time.perf_counter() < end and len(taken) < MOST_CALLS):
        start = time.perf_counter()
        target.call(case.hook, arguments)
        taken.append(time.perf_counter() - start)
    median = statistics.median(taken)
    return Measured(case.id, case.hook, case.dtype, median * 1e6, moved, moved / median, len(taken))


def size_of(value: Any, case: Case) -> int:
    """Bytes of the tensors in ``value``; of a cache what the case's context or its new tokens take."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(size_of(x, case) for x in value)
    if isinstance(value, dict):
        return sum(_cached(case) if name == "cache" else size_of(x, case) for name, x in value.items())
    if isinstance(value, PackedWeight):
        return value.nbytes
    if is_dataclass(value) and not isinstance(value, type | LooseCache | LooseWeight):
        return sum(size_of(getattr(value, f.name), case) for f in fields(value))
    return 0


def _cached(case: Case) -> int:
    loose: LooseCache = case.arguments["cache"]
    rows = loose.key if "cache" not in CATALOG[case.hook].mutates else case.arguments["key"]
    return 2 * rows.numel() * getattr(torch, loose.dtype).itemsize
