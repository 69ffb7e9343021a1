"""Qiao beside what the machine can do at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .pins import Shape
from .targets import figure, is_qiao, peers_of, select
from .workload import CELLS

PROMPT, ANSWER = 128, 128
"""Tokens of a request of the cell ``single``."""

SMOLLM2 = Shape(hidden=576, layers=30, intermediate=1536, heads=9, kv_heads=3, vocabulary=49152)
SHAPES = {"135m": SMOLLM2, "1b": Shape()}
HEAD_DIM = 64

WEIGHT_BYTES = {"4bit": 18 / 32, "16bit": 2.0}
"""Bytes of a weight of a layer: GGUF Q4_0 has 18 bytes for 32 values."""

HEAD_BYTES = {"4bit": 34 / 32, "16bit": 2.0}
"""Bytes of a weight of the head: Q8_0 in the 4-bit files."""

GOALS = {
    ("single", "1b"): 0.85,
    ("prefill", "135m"): 0.35,
    ("prefill", "1b"): 0.65,
}


def layer_weights(shape: Shape) -> int:
    """Weights of all layers' linear maps: q and o, k and v, and the three of the MLP."""
    attention = 2 * shape.hidden * HEAD_DIM * (shape.heads + shape.kv_heads)
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate)


def decode_bytes(shape: Shape, form: str, context: float) -> float:
    """Bytes read for a token of a single stream: each weight once, and 16-bit keys and values of ``context`` tokens."""
    cache = shape.layers * 2 * shape.kv_heads * HEAD_DIM * 2 * context
    head = shape.hidden * shape.vocabulary
    return layer_weights(shape) * WEIGHT_BYTES[form] + head * HEAD_BYTES[form] + cache


def prefill_ops(shape: Shape, tokens: int) -> float:
    """Operations of a prompt, two for a multiplication and addition: layers, causal attention, and the head once."""
    attention = shape.layers * 2 * shape.heads * HEAD_DIM * tokens * (tokens + 1) / 2
    return 2 * (layer_weights(shape) * tokens + attention + shape.hidden * shape.vocabulary)


@dataclass(frozen=True, slots=True)
class Share:
    """A figure as a share of a peak; ``goal`` is None where there is none."""

    cell: str
    size: str
    format: str
    value: float
    unit: str
    peak: float
    goal: float | None

    @property
    def share(self) -> float:
        """Of the peak."""
        return self.value / self.peak


def shares(data: dict[str, Any]) -> list[Share]:
    """Decode against memory bandwidth, and prefill against the arithmetic peak of the instruction used."""
    peaks = data.get("peaks") or {}
    found = []
    for form in ("4bit", "16bit"):
        own = next(filter(is_qiao, peers_of(data, form)), "")
        for size, shape in SHAPES.items():
            decode = figure(select(data, size=size, peer=own, cell="single"), "decode_rate") if own else None
            if decode and "memory_gb_s" in peaks:
                read = decode * decode_bytes(shape, form, PROMPT + ANSWER / 2) / 1e9
                found.append(_share("single", size, form, read, "GB/s", peaks["memory_gb_s"]))
            prefill = figure(select(data, size=size, peer=own, cell="prefill"), "prefill_rate") if own else None
            peak = peaks.get("int8_gop_s" if form == "4bit" else "fp32_gop_s")
            if prefill and peak:
                done = prefill / 1024 * prefill_ops(shape, 1024) / 1e9
                found.append(_share("prefill", size, form, done, "Gop/s", peak))
    return found


def _share(cell: str, size: str, form: str, value: float, unit: str, peak: float) -> Share:
    return Share(cell, size, form, value, unit, peak, GOALS.get((cell, size)))


def limit(peaks: dict[str, Any], cell: str, size: str, form: str) -> float | None:
    """Tokens a second in a cell at the measured peaks, an estimate of what a machine allows; None where unknown.

    A decode step takes as long as its weights and caches take to be read, or its arithmetic if that is longer; prompts
    take their arithmetic. Nothing else costs anything: no other operator, no host, no client on the same processors.
    """
    peak = peaks.get("int8_gop_s" if form == "4bit" else "fp32_gop_s")
    load = next((one for one in CELLS if one.name == cell and one.rate is None), None)
    if load is None or peak is None or "memory_gb_s" not in peaks:
        return None
    shape, prompt, output = SHAPES[size], sum(load.prompt) / 2, sum(load.output) / 2
    prefill = prefill_ops(shape, int(prompt)) / (1e9 * peak)
    if cell == "prefill":
        return prompt / prefill
    context, streams = prompt + output / 2, load.concurrency
    cache = decode_bytes(shape, form, context) - decode_bytes(shape, form, 0)
    read = (decode_bytes(shape, form, 0) + streams * cache) / (1e9 * peaks["memory_gb_s"])
    attention = shape.layers * 4 * shape.heads * HEAD_DIM * context
    once = 2 * (layer_weights(shape) + shape.hidden * shape.vocabulary) + attention
    step = max(read, streams * once / (1e9 * peak))
    if cell == "single":  # its rate leaves the first token out
        return 1 / step
    return streams * output / (output * step + streams * prefill)
