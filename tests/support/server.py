"""A scripted engine that runs in a real engine process, so that transport and server are tested without a model.

The next token depends on the last one only, through a table given in ``EngineArgs.hf_overrides``; a request's
``cache_salt`` names the table, or a text of ``texts`` that is the answer to any prompt. Start it with
``HostOptions(module="tests.support.server")``.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from qiao.config import EngineArgs
from qiao.engine.request import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    FallbackCount,
    SequenceOutput,
    TokenLogprobs,
)
from qiao.errors import ModelError, OverloadedError, ParameterError
from qiao.lora.request import LoRARequest
from qiao.transport import host

EOS = 257
DIE = 301
"""A prompt with this id kills the engine process."""
RAISE = 302
"""A prompt with this id makes a step raise."""
FAULT = 303
"""A prompt with this id fails alone."""
FAULTY = b"\0"
"""A byte of a text at which its request fails alone."""
HELD = "held"
"""A request with this ``cache_salt`` makes no token and runs until it is aborted."""
FULL = 304
"""A prompt with this id is refused as if the queue were full."""


class ScriptedAdapters:
    """LoRA adapters whose file ``answer`` is the answer to any prompt."""

    def __init__(self) -> None:
        self.answers: dict[int, bytes] = {}

    def read(self, request: LoRARequest) -> bytes:
        try:
            return (Path(request.lora_path) / "answer").read_bytes()
        except OSError:
            raise ModelError(f"{request.lora_path}: no such folder") from None

    def add(self, request: LoRARequest, file: bytes) -> None:
        self.answers[request.lora_int_id] = file

    def remove(self, number: int) -> None:
        self.answers.pop(number, None)


class ScriptedEngine:
    """One token a step for every sequence of every request."""

    def __init__(self, args: EngineArgs) -> None:
        given = {"": args.hf_overrides.get("table", {}), **args.hf_overrides.get("tables", {})}
        self.tables = {name: {int(k): int(v) for k, v in table.items()} for name, table in given.items()}
        self.texts = {name: text.encode() for name, text in args.hf_overrides.get("texts", {}).items()}
        self.pause = float(args.hf_overrides.get("pause", 0.0))
        self.limit = args.max_num_seqs
        self.adapters = ScriptedAdapters()
        self.requests: dict[str, EngineRequest] = {}
        self.made: dict[tuple[str, int], list[int]] = {}
        counts = [FallbackCount(*count) for count in args.hf_overrides.get("fallbacks", ())]
        self.totals = EngineStats(kv_blocks_total=100, fallbacks=counts)

    def add_request(self, request: EngineRequest) -> None:
        if FULL in request.prompt_token_ids:
            raise OverloadedError("the queue is full", retry_after=3)
        if RAISE in request.prompt_token_ids:
            raise ZeroDivisionError("a bug in the engine")
        if DIE in request.prompt_token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if request.adapter and request.adapter not in self.adapters.answers:
            raise ParameterError("lora_request", f"no adapter {request.adapter}")
        self.requests[request.request_id] = request
        self.totals.prompt_tokens += len(request.prompt_token_ids)
        for index in range(request.params.n):
            self.made[request.request_id, index] = []

    def abort(self, request_ids: Sequence[str], index: int | None = None) -> None:
        for request_id in request_ids:
            if index is None:
                self.requests.pop(request_id, None)
            for key in [k for k in self.made if k[0] == request_id and index in (None, k[1])]:
                del self.made[key]

    def has_work(self) -> bool:
        return bool(self.made)

    def step(self) -> list[SequenceOutput]:
        moving = [key for key in list(self.made)[: self.limit] if self.requests[key[0]].cache_salt != HELD]
        time.sleep(self.pause if moving else max(self.pause, 0.01))
        self.totals.steps += 1
        return [self._advance(*key) for key in moving]

    def stats(self) -> EngineStats:
        running = min(len(self.made), self.limit)
        self.totals.running, self.totals.waiting = running, len(self.made) - running
        self.totals.kv_blocks_used = running
        waiting = Counter(self.requests[key[0]].priority for key in list(self.made)[running:])
        self.totals.waiting_by_class = {
            "promoted": 0,
            "urgent": waiting[-1000],
            "standard": waiting[0],
            "low": waiting[7],
        }
        return self.totals

    def _advance(self, request_id: str, index: int) -> SequenceOutput:
        request = self.requests[request_id]
        if FAULT in request.prompt_token_ids:
            self.abort([request_id])
            return SequenceOutput(request_id=request_id, finish_reason="error", error="operator attention raised: boom")
        made, params = self.made[request_id, index], request.params
        text = self.adapters.answers.get(request.adapter, self.texts.get(request.cache_salt))
        if text is not None and text[len(made) : len(made) + 1] == FAULTY:
            self.abort([request_id])
            return SequenceOutput(request_id=request_id, finish_reason="error", error="operator attention raised: boom")
        if text is not None:
            token = text[len(made)] if len(made) < len(text) else EOS
        else:
            token = self.tables[request.cache_salt].get((request.prompt_token_ids + made)[-1], EOS)
        made.append(token)
        self.totals.generation_tokens += 1
        reason, stop_reason = None, None
        if token in request.eos_token_ids and not params.ignore_eos:
            reason = "stop"
        elif token in (params.stop_token_ids or ()):
            reason, stop_reason = "stop", token
        elif params.max_tokens is not None and len(made) >= params.max_tokens:
            reason = "length"
        first = len(made) == 1
        output = SequenceOutput(
            request_id=request_id,
            index=index,
            token_ids=[token],
            finish_reason=reason,
            stop_reason=stop_reason,
            scheduled=time.time() if first else None,
            first_token=time.time() if first else None,
        )
        if params.logprobs is not None:
            others = [(token + k + 1) % 256 for k in range(params.logprobs)]
            output.logprobs = [TokenLogprobs([token, *others], [-0.5] + [-2.0 - k for k in range(len(others))], 1)]
        if first and index == 0 and params.prompt_logprobs is not None:
            tail = [TokenLogprobs([t], [-1.0], 1) for t in request.prompt_token_ids[1:]]
            output.prompt_logprobs = [None, *tail]
        if reason is not None:
            del self.made[request_id, index]
        return output


def chain(*texts: str) -> dict[int, int]:
    """A table that makes ``"x>abc"`` answer a prompt that ends in ``x`` with ``abc`` and then EOS (bytes as ids)."""
    table: dict[int, int] = {}
    for text in texts:
        head, _, tail = text.partition(">")
        sequence = [*head.encode()[-1:], *tail.encode(), EOS]
        table |= dict(itertools.pairwise(sequence))
    return table


def build(args: EngineArgs) -> tuple[ScriptedEngine, EngineInfo]:
    """What ``qiao.build`` does for a real engine."""
    if message := args.hf_overrides.get("fail"):
        raise ModelError(message)
    if (path := args.hf_overrides.get("fail_once_there")) and Path(path).exists():
        raise ModelError(f"{path} is there")
    if args.hf_overrides.get("crash"):
        raise KeyError("not a planned error")
    info = EngineInfo(
        device="cpu",
        max_model_len=args.max_model_len or 512,
        vocab_size=320,
        block_size=16,
        num_blocks=100,
        max_num_seqs=args.max_num_seqs,
        max_num_queued=args.max_num_queued_reqs,
        dtype="float32",
        kv_explanation="scripted",
        plan={"operators": args.hf_overrides.get("operators", [])},
    )
    return ScriptedEngine(args), info


def main() -> None:
    """Entry of the child process."""
    host.main(build)


@dataclass
class RunningServer:
    """A server in a process of its own."""

    url: str
    process: subprocess.Popen[str]
    log: list[str]

    def http(self, **options: Any) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def openai(self, **options: Any) -> OpenAI:
        """OpenAI's own client, without retries."""
        given = {"api_key": "none", "max_retries": 0, **options}
        return OpenAI(base_url=self.url + "/v1", http_client=httpx.Client(timeout=60, trust_env=False), **given)

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value on the metrics page, summed over the series that have ``labels``."""
        page = self.http().get("/metrics").text
        families = text_string_to_metric_families(page)
        found = [s.value for f in families for s in f.samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"no sample {name} {labels}"
        return sum(found)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Poll until ``condition`` holds; fails after a minute."""
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "the condition never came true"
            time.sleep(0.01)


LAUNCH = """
import json, sys
from qiao.errors import QiaoError
from qiao.server.flags import parse
from qiao.server.start import serve
from qiao.transport.process import HostOptions
parsed = parse(sys.argv[2:])
sys.exit(serve(parsed.setup, HostOptions(module=sys.argv[1], log_level="warning")))
"""


@contextmanager
def server(model: Path | str, *flags: str, module: str = host.__name__) -> Iterator[RunningServer]:
    """Start ``qiao serve MODEL`` on a free port, served as ``M``, and wait until it is ready.

    ``module`` is the engine process's: the real one, or this module for the scripted engine.
    """
    words = [str(model), "--served-model-name", "M", "org/M", "--max-model-len", "512", *flags]
    with started(words, module) as running:
        yield running


@contextmanager
def started(words: Sequence[str], module: str = host.__name__) -> Iterator[RunningServer]:
    """Start ``qiao serve`` with these words on a free port, and wait until it is ready."""
    root = str(Path(__file__).parents[2])
    environment = {k: v for k, v in os.environ.items() if k not in ("QIAO_API_KEY", "VLLM_API_KEY")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment["OMP_NUM_THREADS"] = "1"
    words = [*words, "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, module, *words], stderr=subprocess.PIPE, text=True, env=environment
    )
    log: list[str] = []
    ready: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read_log, args=(process, log, ready), daemon=True)
    reader.start()
    try:
        address = ready.get(timeout=180)
        if address is None:
            raise AssertionError("the server did not start:\n" + "".join(log))
        yield RunningServer(address, process, log)
    finally:
        process.kill()
        process.wait()
        reader.join()


def scripted(*flags: str, model: Path, **script: Any) -> AbstractContextManager[RunningServer]:
    """A server over the scripted engine; ``model`` has the tokenizer."""
    overrides = json.dumps({"table": {}, **script})
    return server(model, "--hf-overrides", overrides, *flags, module=__name__)


def _read_log(process: subprocess.Popen[str], log: list[str], ready: queue.Queue[str | None]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        log.append(line)
        if line.startswith("  address"):
            ready.put(line.split()[1])
    ready.put(None)
