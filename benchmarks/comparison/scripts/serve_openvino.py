"""OpenVINO GenAI's continuous batching behind ``/v1/completions``: its wheels carry no server.

    python serve_openvino.py MODEL_DIR --port 8201 --threads 2 --kv-tokens 12288

Greedy and streamed only, as thin as it can be, so that what is measured is OpenVINO. Needs openvino-genai, tokenizers,
aiohttp and numpy.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import openvino_genai as genai
from aiohttp import web
from tokenizers import Tokenizer

BLOCK = 32
"""Tokens of a cache block on CPUs."""


class Job(NamedTuple):
    """A request on its way to the engine's thread. ``put`` takes lists of new tokens, and None at the end; ``gone`` is
    set when nobody reads them any more.
    """

    prompt: list[int]
    config: Any
    put: Callable[[list[int] | None], object]
    gone: threading.Event


def pipeline(asked: argparse.Namespace) -> Any:
    """The engine."""
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = -(-asked.kv_tokens // BLOCK)
    scheduler.max_num_seqs = asked.max_seqs
    scheduler.max_num_batched_tokens = 2048
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": asked.threads}
    if asked.precision:
        properties["INFERENCE_PRECISION_HINT"] = asked.precision
    return genai.ContinuousBatchingPipeline(asked.model, scheduler, "CPU", properties)


def engine(pipe: Any, inbox: queue.Queue[Job]) -> None:
    """Step for ever, taking in what came between two steps."""
    ids = itertools.count()
    live: dict[int, tuple[Any, Job]] = {}
    while True:
        while not live or not inbox.empty():
            job = inbox.get()
            number = next(ids)
            handle = pipe.add_request(number, ov.Tensor(np.array([job.prompt], dtype=np.int64)), job.config)
            live[number] = handle, job
        pipe.step()
        for number, (handle, job) in list(live.items()):
            while handle.can_read():
                for output in handle.read().values():
                    job.put(list(output.generated_ids))
            if job.gone.is_set():
                handle.cancel()
            if job.gone.is_set() or handle.get_status() != genai.GenerationStatus.RUNNING:
                job.put(None)
                del live[number]


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def application(asked: argparse.Namespace) -> web.Application:
    """The server over a running engine."""
    inbox: queue.Queue[Job] = queue.Queue()
    tokenizer = Tokenizer.from_file(str(Path(asked.model) / "tokenizer.json"))
    threading.Thread(target=engine, args=(pipeline(asked), inbox), daemon=True).start()

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        loop = asyncio.get_running_loop()
        arriving: asyncio.Queue[list[int] | None] = asyncio.Queue()
        config = genai.GenerationConfig()
        config.max_new_tokens = int(body.get("max_tokens", 16))
        config.ignore_eos = bool(body.get("ignore_eos", False))
        config.do_sample = False
        prompt = tokenizer.encode(body["prompt"], add_special_tokens=False).ids
        gone = threading.Event()
        inbox.put(Job(prompt, config, lambda tokens: loop.call_soon_threadsafe(arriving.put_nowait, tokens), gone))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = 0
        frame = {"object": "text_completion", "created": int(time.time()), "model": "m"}
        try:
            while (tokens := await arriving.get()) is not None:
                count += len(tokens)
                text = tokenizer.decode(tokens, skip_special_tokens=False) or " "
                await response.write(event(frame | {"choices": [{"index": 0, "text": text, "finish_reason": None}]}))
        finally:
            gone.set()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
        await response.write(event(frame | {"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/health", health)
    return app


def main() -> None:
    """Serve on this machine only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8201)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-tokens", type=int, default=12288)
    parser.add_argument("--max-seqs", type=int, default=32)
    parser.add_argument("--precision", default="", help="INFERENCE_PRECISION_HINT, for example f32")
    asked = parser.parse_args()
    web.run_app(application(asked), host="127.0.0.1", port=asked.port, print=None)


if __name__ == "__main__":
    main()
