"""Speed of qiao-cpu's kernels against what the machine can do, beside torch's and the reference plugin's.

    python benchmarks/cpu_kernels.py [--threads N] [--isa NAME] [--only TEXT] [--json FILE] [--plot FILE]

The machine's peaks are measured in the same run: reading memory and cache, and multiply-adds of float32. `of peak` is
the time that the operator needs at those peaks, its bytes read once or its operations done in float32 (none where it
works on int8), over the time that it took. Weights rotate through more memory than the caches hold, unless a shape is
marked `hot`. Each figure is the best of interleaved rounds, since other work on the machine only ever adds to a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import qiao_cpu
import qiao_reference
import torch
from qiao.contract import AttentionMetadata, PackedWeight, SamplingTensors, WeightInfo
from qiao_cpu import native
from qiao_cpu.matmul import Packed
from torch.nn import functional

MEMORY, CACHE = 300 << 20, 12 << 20
"""Bytes that no cache holds, and that a shared cache does."""

SHAPES = ((1536, 576, True), (1536, 576, False), (49152, 576, False), (2048, 2048, False), (5632, 2048, False))
"""(outputs, inputs, whether the weight stays in the cache)."""

ROWS = (1, 2, 4, 8, 24, 64, 1024)
CONTEXTS = ((1, 1, 1024), (8, 1, 1024), (24, 1, 200), (1, 512, 1024))
"""(sequences, queries of each, context)."""

Call = Callable[[], Any]


class Work(NamedTuple):
    """What a call has to read and to compute, and whether it computes in float32."""

    nbytes: float
    operations: float = 0.0
    float32: bool = True


@dataclass
class Peaks:
    """GB/s read from memory and from the shared cache, float32 Gop/s; all threads together."""

    memory: float
    cache: float
    float32: float

    def seconds(self, work: Work, hot: bool) -> float:
        """Least time for the reading and the float32 arithmetic."""
        arithmetic = work.operations / self.float32 if work.float32 else 0.0
        return max(work.nbytes / (self.cache if hot else self.memory), arithmetic) / 1e9


@dataclass
class Row:
    """One measurement."""

    kernel: str
    shape: str
    us: float
    gb_s: float
    gop_s: float
    of_peak: float


def best(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    """Least seconds of each call, taken in turn for about ``seconds`` and at least three times."""
    found = dict.fromkeys(calls, float("inf"))
    begin, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - begin < seconds:
        rounds += 1
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - start)
    return found


def measured_peaks() -> Peaks:
    """The machine's limits, by loops of the same instruction set and threads as the kernels."""
    memory = torch.zeros(MEMORY, dtype=torch.uint8)
    rounds = 200_000
    calls: dict[str, Call] = {
        "memory": lambda: native.work(0, memory.data_ptr(), MEMORY),
        "cache": lambda: [native.work(0, memory.data_ptr(), CACHE) for _ in range(4)],
        "float32": lambda: native.work(1, None, rounds),
    }
    took = best(calls, 2)
    operations = 2 * 12 * native.lanes() * rounds * native.threads()
    return Peaks(MEMORY / took["memory"] / 1e9, 4 * CACHE / took["cache"] / 1e9, operations / took["float32"] / 1e9)


def rows_of(
    kernel: str, shape: str, calls: dict[str, Call], work: dict[str, Work], peaks: Peaks, hot: bool
) -> Iterator[Row]:
    """Measure; ``work`` has each call's bytes to read and operations."""
    for name, seconds in best(calls, 0.2).items():
        todo = work[name]
        speeds = (todo.nbytes / seconds / 1e9, todo.operations / seconds / 1e9)
        yield Row(f"{kernel} {name}", shape, seconds * 1e6, *speeds, peaks.seconds(todo, hot) / seconds)


def weights(outputs: int, inputs: int, dtype: torch.dtype) -> dict[str, PackedWeight]:
    """A weight of each scheme, with groups of 64."""
    info = WeightInfo("w", inputs, outputs, 4, 64)
    scale = torch.rand(outputs, inputs // 64).half().float()
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    tensors = {
        "dense": {"weight": torch.randn(outputs, inputs).to(dtype)},
        "w4a16": {"weight": codes, "scale": scale, "zero": torch.full_like(scale, 8)},
        "w8a8": {"weight": codes.to(torch.int8), "scale": scale[:, :1]},
    }
    return {scheme: qiao_cpu.pack_weight(scheme, parts, info, "cpu") for scheme, parts in tensors.items()}


def turning(weight: PackedWeight, hot: bool) -> Iterator[PackedWeight]:
    """The weight again and again, each time in other memory unless it is to stay in the cache."""

    def copy() -> PackedWeight:
        data = Packed(weight.scheme, weight.info, {name: tensor.clone() for name, tensor in weight.data.items()})
        return PackedWeight(weight.scheme, weight.info, data)

    return itertools.cycle([copy() for _ in range(1 if hot else max(1, MEMORY // weight.nbytes))])


def products(peaks: Peaks) -> Iterator[Row]:
    """Linear layers: each scheme, torch in the same type and torch in float32."""
    for (outputs, inputs, hot), dtype in itertools.product(SHAPES, (torch.bfloat16, torch.float16, torch.float32)):
        made = weights(outputs, inputs, dtype)
        packed = {scheme: turning(weight, hot) for scheme, weight in made.items()}
        plain = {}
        for kind in {dtype, torch.float32}:
            count = 1 if hot else max(1, MEMORY // (outputs * inputs * kind.itemsize))
            plain[kind] = itertools.cycle([torch.randn(outputs, inputs).to(kind) for _ in range(count)])
        for rows in ROWS:
            if rows > 64 and outputs > 40_000:
                continue
            x = torch.randn(rows, inputs).to(dtype)
            calls: dict[str, Call] = {s: partial(_own, x, weight) for s, weight in packed.items()}
            calls |= {f"torch {str(k)[6:]}": partial(_torch, x.to(k), w) for k, w in plain.items()}
            operations = 2.0 * rows * inputs * outputs
            sizes = {s: w.nbytes for s, w in made.items()}
            sizes |= {f"torch {str(k)[6:]}": outputs * inputs * k.itemsize for k in plain}
            work = {name: Work(nbytes, operations, name not in ("w4a16", "w8a8")) for name, nbytes in sizes.items()}
            shape = f"{rows} x {inputs} x {outputs} {str(dtype)[6:]}{' hot' if hot else ''}"
            yield from rows_of("matmul", shape, calls, work, peaks, hot)


def _own(x: torch.Tensor, weight: Iterator[PackedWeight]) -> torch.Tensor:
    return qiao_cpu.matmul(x, next(weight), None)


def _torch(x: torch.Tensor, weight: Iterator[torch.Tensor]) -> torch.Tensor:
    return functional.linear(x, next(weight))


def attentions(peaks: Peaks) -> Iterator[Row]:
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
        calls: dict[str, Call] = {}
        for name, plugin, layout in (("own", qiao_cpu, "HND"), ("reference", qiao_reference, "NHD")):
            cache = plugin.allocate_kv(seqs * blocks, 16, kv_heads, 64, dtype, layout, "cpu")
            plugin.write_kv(key, value, cache, slots)
            calls[name] = partial(plugin.attention, query, cache, metadata, 0.125, 0, 0.0)
        operations = 4.0 * seqs * queries * (context - queries / 2) * heads * 64
        work = dict.fromkeys(calls, Work(2.0 * key.nbytes, operations))
        shape = f"{seqs} x {queries} of {context}, {heads}/{kv_heads} heads {str(dtype)[6:]}"
        yield from rows_of("attention", shape, calls, work, peaks, True)


def lights(peaks: Peaks) -> Iterator[Row]:
    """Norms, gates, rotation and sampling at the sizes of a 135M model, in bfloat16; plain torch beside them."""
    for rows in (1, 24, 1024):
        x, residual = (torch.randn(rows, 576).bfloat16() for _ in range(2))
        both, gain = torch.randn(rows, 3072).bfloat16(), torch.randn(576).bfloat16()
        query, key = torch.randn(rows, 9, 64).bfloat16(), torch.randn(rows, 3, 64).bfloat16()
        angles = torch.randn(rows, 32)
        pairs: dict[str, tuple[float, Call, Call]] = {}
        pairs["rms_norm"] = (x.nbytes * 2, *_both("rms_norm", x, gain, 1e-5))
        pairs["add_rms_norm"] = (x.nbytes * 4, *_both("add_rms_norm", x, residual, gain, 1e-5))
        pairs["silu_mul"] = (both.nbytes * 1.5, *_both("silu_mul", both))
        pairs["gelu_mul"] = (both.nbytes * 1.5, *_both("gelu_mul", both))
        pairs["rotary"] = ((query.nbytes + key.nbytes) * 2, *_both("rotary", query, key, angles, angles, False))
        if rows < 100:
            for name, params in (("greedy", _settings(rows, 0.0)), ("top-p 0.9", _settings(rows, 0.8))):
                logits = torch.randn(rows, 49152) * 4
                pairs[f"sample {name}"] = (logits.nbytes, *_both("sample", logits, params))
        for name, (nbytes, own, plain) in pairs.items():
            calls: dict[str, Call] = {"own": own, "reference": plain}
            yield from rows_of(name, f"{rows} rows", calls, dict.fromkeys(calls, Work(nbytes)), peaks, True)


def _both(hook: str, *arguments: Any) -> tuple[Call, Call]:
    """The hook of this plugin, and the reference's or the composite that it stands for."""
    from qiao.contract import composites

    plain = getattr(qiao_reference, hook, None) or getattr(composites, hook)
    return partial(getattr(qiao_cpu, hook), *arguments), partial(plain, *arguments)


def _settings(rows: int, temperature: float) -> SamplingTensors:
    each = [torch.full((rows,), value) for value in (temperature, 0.9, 0.0, 0.5)]
    top_k = torch.zeros(rows, dtype=torch.int32)
    return SamplingTensors(each[0], top_k, *each[1:], temperature == 0, False, True, False)


def plot(rows: list[Row], peaks: Peaks, path: Path) -> None:
    """Share of the peak of the dense products over their rows, a line for each shape."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.kernel == "matmul dense":
            count, _, shape = row.shape.partition(" x ")
            lines.setdefault(shape, []).append((int(count), 100 * row.of_peak))
    for shape, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=shape)
    axes.set(xscale="log", xlabel="rows", ylabel="% of the machine's limit", ylim=(0, 105))
    axes.set_title(f"{peaks.memory:.0f} GB/s memory, {peaks.cache:.0f} cache, {peaks.float32:.0f} Gop/s float32")
    axes.legend(fontsize=6)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default="")
    parser.add_argument("--only", default="", help="products, attentions or lights")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    chosen = native.start()
    if asked.isa:
        native.select(asked.isa)
    if asked.threads:
        native.set_threads(asked.threads)
    torch.set_num_threads(native.threads())
    peaks = measured_peaks()
    print(f"kernels {native.isa()}, {native.threads()} threads (at start: {chosen})")
    print(f"peaks: {peaks.memory:.1f} GB/s memory, {peaks.cache:.1f} GB/s cache, {peaks.float32:.1f} Gop/s float32")
    rows = []
    for family in (products, attentions, lights):
        if asked.only not in family.__name__:
            continue
        for row in family(peaks):
            rows.append(row)
            speed = f"{row.us:10.1f} us {row.gb_s:7.1f} GB/s {row.gop_s:7.1f} Gop/s {100 * row.of_peak:4.0f} % of peak"
            print(f"{row.kernel:24} {row.shape:40} {speed}", flush=True)
    if asked.json:
        report = {
            "isa": native.isa(),
            "threads": native.threads(),
            "peaks": asdict(peaks),
            "rows": list(map(asdict, rows)),
        }
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
    if asked.plot:
        plot(rows, peaks, asked.plot)


if __name__ == "__main__":
    main()
