"""Servers under test: how each is started, and a running one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .load import Body, completion_body, plain_body, stream
from .pins import REPOSITORY, SCRIPTS, Place
from .workload import Request

KV_TOKENS = 12288
"""Room in each KV cache: more than 24 streams of the longest prompt and answer take (10,272)."""

MAX_LEN = 2048
START_SECONDS = 900
FIRST = Request(at=0.0, prompt="the time of day", prompt_tokens=4, output_tokens=2)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the commands of the peers are made from."""

    place: Place
    size: str
    threads: int
    qiao: Path
    qiao_dtype: str = "auto"
    qiao_flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A server in one format. ``command`` gives its words for a port; ``cells`` limits what it is measured on.

    ``cancels`` says that it drops a request whose client has gone.
    """

    name: str
    format: str
    command: Callable[[Setting, int], list[str]]
    env: Callable[[Setting], dict[str, str]] = field(default=lambda _: {})
    body: Body = completion_body
    cells: tuple[str, ...] | None = None
    sizes: tuple[str, ...] = ("135m", "1b")
    cancels: bool = True

    @property
    def product(self) -> str:
        """The name that ``--peers`` takes: what stands before the first blank."""
        return self.name.split(" ")[0]


KV_BYTES = {"135m": 30 * 2 * 3 * 64 * 2, "1b": 22 * 2 * 4 * 64 * 2}
"""Bytes of KV cache for a token at 16 bit: layers, keys and values, heads, head size, bytes."""


def _qiao(kind: str, dtype: str | None = None) -> Callable[[Setting, int], list[str]]:
    def command(setting: Setting, port: int) -> list[str]:
        model = str(setting.place.model(setting.size, kind))
        cache = str(KV_TOKENS * KV_BYTES[setting.size])
        words = [str(setting.qiao), "-m", "qiao.server", model, "--device", "cpu", "--port", str(port)]
        words += ["--served-model-name", "m", "--max-num-seqs", "32", "--max-model-len", str(MAX_LEN)]
        words += ["--kv-cache-memory-bytes", cache, "--threads", str(setting.threads)]
        return [*words, "--dtype", dtype or setting.qiao_dtype, "--disable-access-log", *setting.qiao_flags]

    return command


def _llama(kind: str) -> Callable[[Setting, int], list[str]]:
    def command(setting: Setting, port: int) -> list[str]:
        words = [str(setting.place.llama_tool("llama-server")), "-m", str(setting.place.model(setting.size, kind))]
        words += ["--host", "127.0.0.1", "--port", str(port), "-t", str(setting.threads), "-tb", str(setting.threads)]
        # One cache for all streams, faster here than one each; no copies of old prompts, which would help nobody.
        return [*words, "-np", "24", "-kvu", "-c", str(KV_TOKENS), "--cache-ram", "0"]

    return command


def _openvino(kind: str) -> Callable[[Setting, int], list[str]]:
    def command(setting: Setting, port: int) -> list[str]:
        words = [str(setting.place.python("openvino")), str(SCRIPTS / "serve_openvino.py")]
        words += [str(setting.place.model(setting.size, kind)), "--port", str(port), "--threads", str(setting.threads)]
        return [*words, "--kv-tokens", str(KV_TOKENS)]

    return command


def _vllm(kind: str, dtype: str) -> Callable[[Setting, int], list[str]]:
    def command(setting: Setting, port: int) -> list[str]:
        words = [str(setting.place.tool("vllm", "vllm")), "serve", str(setting.place.model(setting.size, kind))]
        words += ["--port", str(port), "--served-model-name", "m", "--dtype", dtype, "--max-num-seqs", "32"]
        words += ["--max-model-len", str(MAX_LEN), "--disable-uvicorn-access-log", "--disable-log-stats"]
        return [*words, "--no-enable-prefix-caching"]

    return command


def _vllm_env(setting: Setting) -> dict[str, str]:
    openmp = setting.place.root / "env" / "vllm" / "lib" / "libiomp5.so"
    found = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, whole ones only
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(setting.place.root / "vllm-cache"),
    }
    return found | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


def _transformers(setting: Setting, port: int) -> list[str]:
    words = [str(setting.place.tool("transformers", "transformers")), "serve"]
    words += [str(setting.place.model(setting.size, "hf-endless")), "--host", "127.0.0.1", "--port", str(port)]
    blocks = ["--cb-block-size", "32", "--cb-num-blocks", str(KV_TOKENS // 32), "--cb-max-batch-tokens", "2048"]
    return [*words, "--device", "cpu", "--dtype", "auto", "--continuous-batching", *blocks]


PEERS = (
    Peer(name="qiao 4 bit", format="4bit", command=_qiao("q4_0.gguf")),
    Peer(name="openvino int4", format="4bit", command=_openvino("ov-int4")),
    Peer(name="llama.cpp Q4_0", format="4bit", command=_llama("q4_0.gguf")),
    Peer(name="vllm GPTQ", format="4bit", command=_vllm("gptq", "bfloat16"), env=_vllm_env),
    Peer(name="qiao 16 bit", format="16bit", command=_qiao("hf", "auto")),
    Peer(name="openvino fp16", format="16bit", command=_openvino("ov-fp16")),
    Peer(name="llama.cpp F16", format="16bit", command=_llama("f16.gguf")),
    Peer(name="vllm bf16", format="16bit", command=_vllm("hf", "bfloat16"), env=_vllm_env),
    Peer(
        name="transformers bf16",
        format="16bit",
        command=_transformers,
        env=lambda setting: {"OMP_NUM_THREADS": str(setting.threads)},
        body=plain_body,
        cells=("single", "prefill", "streams8"),
        sizes=("135m",),
        cancels=False,
    ),
)
PRODUCTS = tuple(dict.fromkeys(peer.product for peer in PEERS))


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def first_error(log: str) -> str:
    """The first exception that ``log`` reports, without what stands before it in its line; else the last line.

    What follows the first is often only what that led to. Lines of information and warnings, which may quote errors
    that did not happen, do not count, nor does source code.
    """
    lines = log.strip().splitlines()
    for line in lines:
        if not re.search(r"\b(?:DEBUG|INFO|WARNING)\b", line):
            found = re.search(r"(?:^|[\])] )((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .+)", line)
            if found:
                return found[1]
    return lines[-1] if lines else "it said nothing"


class Server:
    """A running server. A signal stops it while another is measured, so that it neither computes nor spins."""

    def __init__(self, peer: Peer, setting: Setting, log: Path) -> None:
        """Start it and return when it has answered its first request.

        Raises ``RuntimeError`` with its last words where it ends or does not answer in time.
        """
        self.peer = peer
        self.port = free_port()
        self._log = log
        self.command = peer.command(setting, self.port)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **peer.env(setting)}
        if peer.product != "qiao":
            environment.pop("PYTHONPATH", None)
        start = time.monotonic()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                self.command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                cwd=REPOSITORY,
            )
        try:
            self._await_first_answer(start + START_SECONDS)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - start
        """Seconds from the command to the end of its first answer, of two tokens."""

    @property
    def pid(self) -> int:
        """Of the first process of the server."""
        return self._process.pid

    def _await_first_answer(self, deadline: float) -> None:
        said = "nothing answered"
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"ended with status {self._process.returncode}: {self._last_words()}")
            timing = asyncio.run(stream(self.port, self.peer.body(FIRST)))
            if timing.error is None:
                return
            said = timing.error
            time.sleep(0.1)
        raise RuntimeError(f"not ready after {START_SECONDS} s ({said}): {self._last_words()}")

    def _last_words(self) -> str:
        return first_error(self._log.read_text(errors="replace"))[:300]

    def pause(self) -> None:
        """Stop all its processes until ``resume``."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it and all that it started."""
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
