"""Speed of qiao-cpu's kernels beside torch's and the reference plugin's, one line a shape.

    python benchmarks/cpu_kernels.py [--threads N] [--isa NAME] [--json FILE]

Weights rotate through more memory than the caches hold, so that products of few rows show memory bandwidth. Each figure
is the median of interleaved rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import qiao_cpu
import qiao_reference
import torch
from qiao.contract import AttentionMetadata, PackedWeight, WeightInfo
from qiao_cpu import native
from qiao_cpu.matmul import Packed
from torch.nn import functional

FOOTPRINT = 300 << 20
SHAPES = ((1536, 576), (49152, 576), (2048, 2048), (5632, 2048))
ROWS = (1, 4, 8, 24, 256)
CONTEXTS = ((1, 1, 1024), (8, 1, 1024), (24, 1, 200), (1, 512, 1024))
"""(sequences, queries of each, context)."""


def medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of each call, taken in turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def weights(outputs: int, inputs: int, dtype: torch.dtype) -> dict[str, PackedWeight]:
    """A weight of each scheme, with groups of 64."""
    info = WeightInfo("w", inputs, outputs, 4, 64)
    scale = torch.rand(outputs, inputs // 64).half().float()
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    dense = torch.randn(outputs, inputs).to(dtype)
    tensors = {
        "dense": {"weight": dense},
        "w4a16": {"weight": codes, "scale": scale, "zero": torch.full_like(scale, 8)},
        "w8a8": {"weight": codes.to(torch.int8), "scale": scale[:, :1]},
    }
    return {scheme: qiao_cpu.pack_weight(scheme, parts, info, "cpu") for scheme, parts in tensors.items()}


def copies(weight: PackedWeight) -> Iterator[PackedWeight]:
    """The weight again and again, each time in other memory."""
    count = max(1, FOOTPRINT // weight.nbytes)
    return itertools.cycle([_copy(weight) for _ in range(count)])


def _copy(weight: PackedWeight) -> PackedWeight:
    data = Packed(weight.scheme, weight.info, {name: tensor.clone() for name, tensor in weight.data.items()})
    return PackedWeight(weight.scheme, weight.info, data)


def products(rounds: int) -> Iterator[dict[str, Any]]:
    """Linear layers."""
    for (outputs, inputs), dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        made = weights(outputs, inputs, dtype)
        turning = {scheme: copies(weight) for scheme, weight in made.items()}
        count = max(1, FOOTPRINT // (outputs * inputs * dtype.itemsize))
        plain = itertools.cycle([torch.randn(outputs, inputs).to(dtype) for _ in range(count)])
        for rows in ROWS:
            x = torch.randn(rows, inputs).to(dtype)
            calls: dict[str, Callable[[], Any]] = {"torch dense": lambda x=x, w=plain: functional.linear(x, next(w))}
            for scheme, weight in turning.items():
                calls[scheme] = lambda x=x, weight=weight: qiao_cpu.matmul(x, next(weight), None)
            sizes = {"torch dense": made["dense"].nbytes, **{s: w.nbytes for s, w in made.items()}}
            for name, seconds in medians(calls, rounds if rows < 100 else 3).items():
                yield {
                    "kernel": f"matmul {name}",
                    "shape": f"{rows} x {inputs} x {outputs} {str(dtype)[6:]}",
                    "us": seconds * 1e6,
                    "GB/s": sizes[name] / seconds / 1e9,
                    "Gop/s": 2 * rows * inputs * outputs / seconds / 1e9,
                }


def attentions(rounds: int) -> Iterator[dict[str, Any]]:
    """Paged attention with 9 heads over 3 of size 64, and 32 over 4."""
    sizes = itertools.product(((9, 3), (32, 4)), CONTEXTS, (torch.float32, torch.bfloat16))
    for (heads, kv_heads), (seqs, queries, context), dtype in sizes:
        blocks = -(-context // 16)
        tables = torch.randperm(seqs * blocks).view(seqs, blocks).int()
        position = torch.arange(context)
        slots = (tables.long()[:, position // 16] * 16 + position % 16).flatten()
        starts = torch.arange(0, seqs * queries + 1, queries, dtype=torch.int32)
        lens = torch.full((seqs,), context, dtype=torch.int32)
        metadata = AttentionMetadata(starts, lens, tables, slots, (queries,) * seqs, (context,) * seqs)
        query = torch.randn(seqs * queries, heads, 64).to(dtype)
        key, value = (torch.randn(seqs * context, kv_heads, 64).to(dtype) for _ in range(2))
        calls: dict[str, Callable[[], Any]] = {}
        for name, plugin, layout in (("own", qiao_cpu, "HND"), ("reference", qiao_reference, "NHD")):
            cache = plugin.allocate_kv(seqs * blocks, 16, kv_heads, 64, dtype, layout, "cpu")
            plugin.write_kv(key, value, cache, slots)
            calls[name] = partial(plugin.attention, query, cache, metadata, 0.125, 0, 0.0)
        for name, seconds in medians(calls, rounds).items():
            yield {
                "kernel": f"attention {name}",
                "shape": f"{seqs} x {queries} of {context}, {heads}/{kv_heads} heads {str(dtype)[6:]}",
                "us": seconds * 1e6,
                "GB/s": 2 * key.nbytes / seconds / 1e9,
                "Gop/s": 4 * seqs * queries * (context - queries / 2) * heads * 64 / seconds / 1e9,
            }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default="")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    chosen = native.start()
    if asked.isa:
        native.select(asked.isa)
    if asked.threads:
        native.set_threads(asked.threads)
    torch.set_num_threads(native.threads())
    print(f"kernels {native.isa()}, {native.threads()} threads (at start: {chosen})")
    rows = []
    for row in itertools.chain(products(asked.rounds), attentions(asked.rounds)):
        rows.append(row)
        speed = f"{row['us']:10.1f} us {row['GB/s']:7.1f} GB/s {row['Gop/s']:7.1f} Gop/s"
        print(f"{row['kernel']:20} {row['shape']:40} {speed}")
    if asked.json:
        report = {"isa": native.isa(), "threads": native.threads(), "rows": rows}
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
