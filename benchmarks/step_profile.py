"""Where the time of qiao-cpu goes, kernel by kernel: captured decode steps by batch size, and one prompt.

    python benchmarks/step_profile.py --model MODEL [--sizes 1,8,24] [--context 192] [--prompt 1024] [--json FILE]

Decode: the recorded program of each batch size is replayed with a clock around each call, so that Python has no part in
it. Prompt: the same clock around the native functions, called by the engine; what is not in them is ``around them``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison.machine import describe
from comparison.report import table
from qiao.build import build_engine
from qiao.config import EngineArgs
from qiao.engine import Engine
from qiao.engine.request import EngineRequest
from qiao.sampling_params import SamplingParams
from qiao_cpu import native

TIMES = 20
PROFILED = (
    *("matmul", "attention", "rotary", "write", "norm", "gated", "gather_rows", "gather_columns", "convert", "scale"),
    *("add", "soft_cap", "argmax", "sample", "copy", "zero", "combine"),
    *("expert_matmul", "route_experts", "combine_experts"),
)
"""Native functions that a step calls."""

LAYERS, HEAD = "matrix products of the layers", "matrix product of the head"


def queue(engine: Engine, size: int, prompt: int, tokens: int, vocab: int) -> None:
    """``size`` greedy requests of random tokens."""
    numbers = random.Random(f"{size} {prompt}")
    for i in range(size):
        ids = [numbers.randrange(vocab // 2) for _ in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        request = EngineRequest(request_id=f"{size}-{i}", arrival=time.time(), prompt_token_ids=ids, params=params)
        engine.add_request(request)


def finish(engine: Engine) -> None:
    """Steps until nothing is left."""
    while engine.has_work():
        engine.step()


def kinds(calls: list[tuple[str, float]]) -> dict[str, float]:
    """Milliseconds by kind of call; the last matrix product is the head's."""
    found: dict[str, float] = {}
    head = max((i for i, (name, _) in enumerate(calls) if name == "matmul"), default=-1)
    for i, (name, seconds) in enumerate(calls):
        kind = name if name != "matmul" else HEAD if i == head else LAYERS
        found[kind] = found.get(kind, 0.0) + 1e3 * seconds
    return found


def decode(engine: Engine, size: int, context: int, vocab: int) -> dict[str, float]:
    """Milliseconds of a step of ``size`` requests by kind of call, and of the part outside the program."""
    last: list[tuple[native.Program, float]] = []
    plain = native.Program.replay

    def noted(program: native.Program) -> None:
        start = time.perf_counter()
        plain(program)
        last[:] = [(program, time.perf_counter() - start)]

    native.Program.replay = noted  # type: ignore[method-assign]
    queue(engine, size, context, TIMES * 3 + 16, vocab)
    outside = []
    while engine.has_work():
        last.clear()
        start = time.perf_counter()
        engine.step()
        if last:
            outside.append(time.perf_counter() - start - last[0][1])
        if len(outside) == TIMES * 2:
            break
    native.Program.replay = plain  # type: ignore[method-assign]
    found = kinds(last[0][0].profile(TIMES))
    finish(engine)
    return {**found, "around them": 1e3 * statistics.median(outside)}


def prefill(engine: Engine, prompt: int, vocab: int) -> dict[str, float]:
    """Milliseconds of a prompt by kind of call, the median of three prompts, and what is around the calls."""
    calls: list[tuple[str, float]] = []
    plain = {name: getattr(native, name) for name in PROFILED}

    def clocked(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            status = plain[name](*args)
            calls.append((name, time.perf_counter() - start))
            return status

        return call

    found = []
    for name in PROFILED:
        setattr(native, name, clocked(name))
    for number in range(4):  # the first warms up
        calls.clear()
        queue(engine, 1, prompt + number, 1, vocab)
        start = time.perf_counter()
        finish(engine)
        whole = time.perf_counter() - start
        row = kinds(calls)
        found.append({**row, "around them": 1e3 * whole - sum(row.values())})
    for name in PROFILED:
        setattr(native, name, plain[name])
    return sorted(found[1:], key=lambda row: sum(row.values()))[1]


def render(found: dict[str, dict[str, float]]) -> str:
    """A Markdown table: kinds of calls by cell, milliseconds and percent."""
    first = next(iter(found.values()))
    names = sorted({kind for row in found.values() for kind in row}, key=lambda kind: -first.get(kind, 0.0))
    rows = [[kind, *(_cell(row, kind) for row in found.values())] for kind in names]
    rows.append(["all", *(f"{sum(row.values()):.2f}" for row in found.values())])
    return table(("milliseconds", *found), rows)


def _cell(row: dict[str, float], kind: str) -> str:
    return f"{row[kind]:.2f} ({row[kind] / sum(row.values()):.0%})" if kind in row else ""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sizes", default="1,8,24")
    parser.add_argument("--context", type=int, default=192, help="tokens in the cache of each request")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    arguments = EngineArgs(
        model=asked.model,
        device="cpu",
        dtype=asked.dtype,
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
    )
    built = build_engine(arguments)
    found = {f"prompt of {asked.prompt}": prefill(built.engine, asked.prompt, built.info.vocab_size)}
    for size in map(int, asked.sizes.split(",")):
        found[f"{size} streams"] = decode(built.engine, size, asked.context, built.info.vocab_size)
    print(render(found))
    if asked.json:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "model": Path(asked.model).name,
            "dtype": built.info.dtype,
            "machine": describe(),
            "isa": native.isa(),
            "context": asked.context,
            "milliseconds": found,
        }
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
