"""Memory after many requests: nothing of a request stays, whether it was good, wrong, or given up by its client."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.checkpoints import rand_checkpoint
from tests.support.server import RunningServer, server

pytestmark = pytest.mark.acceptance

CALLS = int(os.environ.get("QIAO_MEMORY_CALLS", "20000"))
GROWTH = 1 << 20
"""Bytes by which all processes together may grow in the last quarter."""


def anonymous(running: RunningServer) -> int:
    """RssAnon and VmSwap of the server and its engine, in bytes."""
    total = 0
    parent = psutil.Process(running.process.pid)
    for process in [parent, *parent.children(recursive=True)]:
        text = Path(f"/proc/{process.pid}/status").read_text()
        total += sum(int(kib) * 1024 for kib in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", text, re.MULTILINE))
    return total


async def load(running: RunningServer, numbers: itertools.count[int], count: int) -> None:
    """``count`` calls, each with a text of its own: good ones, wrong ones, ones that are given up, and responses."""
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as http:

        async def one() -> None:
            number = next(numbers)
            prompt = f"unique text number {number:08d} of forty bytes"
            body = {"model": "M", "prompt": prompt, "max_tokens": 1}
            if number % 4 == 0:
                answer = await http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
            elif number % 4 == 1:
                answer = await http.post("/v1/completions", json={**body, "temperature": -1})
                assert answer.status_code == 400
            elif number % 4 == 2:
                endless = {**body, "max_tokens": 100, "ignore_eos": True, "stream": True}
                async with http.stream("POST", "/v1/completions", json=endless) as stream:
                    await anext(stream.aiter_raw())
            else:
                given = {"model": "M", "input": prompt, "max_output_tokens": 1}
                answer = await http.post("/v1/responses", json=given)
                assert answer.status_code == 200, answer.text

        left = itertools.repeat(None, count)

        async def work() -> None:
            for _ in left:
                await one()

        await asyncio.gather(*(work() for _ in range(8)))


@pytest.mark.parametrize("caching", ["--enable-prefix-caching", "--no-enable-prefix-caching"])
def test_memory_is_flat(tmp_path: Path, caching: str) -> None:
    """B122: flat in the end; before, bounded caches fill and the allocator finds its size."""
    folder, numbers = rand_checkpoint(tmp_path / "rand"), itertools.count()
    flags = ("--dtype", "float32", "--num-gpu-blocks-override", "256", "--threads", "1", "--disable-access-log")
    with server(folder, *flags, "--responses-max-count", "100", caching) as running:
        found = []
        for _ in range(4):
            asyncio.run(load(running, numbers, CALLS // 4))
            found.append(anonymous(running))
        print(f"{caching}: " + ", ".join(f"{one / 2**20:.2f} MiB" for one in found))
        assert found[3] - found[2] < GROWTH, found
        assert running.metric("vllm:num_requests_running") == 0
