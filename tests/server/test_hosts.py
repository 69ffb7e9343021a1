"""``qiao engine`` on two hosts behind one ``qiao serve --engine``, as processes."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
from qiao.transport.curve import make_keys

from tests.support.server import RunningServer, chain, started

HOST = """
import json, sys
from pathlib import Path
from qiao.config import EngineArgs
from qiao.server.engine_host import host_engine
from qiao.transport.process import HostOptions
script, model, address, keys = json.loads(sys.argv[1]), *sys.argv[2:]
args = EngineArgs(model=model, hf_overrides=script)
options = HostOptions(module="tests.support.server", log_level="warning")
sys.exit(host_engine(args, address, Path(keys), 20.0, "info", options))
"""

SCRIPT = '{"table": %s, "tables": {"endless": %s}, "pause": 0.02}'


@contextmanager
def engine_host(
    model: Path, keys: Path, address: str = "tcp://127.0.0.1:0"
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """An engine's host in processes of its own, with its address."""
    script = SCRIPT % (json.dumps(chain("x>ok")), json.dumps(dict.fromkeys(range(260), 97)))
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", HOST, script, str(model), address, str(keys)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    found: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("  address"):
                found.put(line.split()[1])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield found.get(timeout=120), process
    finally:
        process.kill()
        process.wait()
        reader.join()


def ask(running: RunningServer, **body: object) -> httpx.Response:
    with running.http() as http:
        return http.post("/v1/completions", json={"prompt": "x", **body})


def test_a_front_end_outlives_its_engines_hosts_and_takes_them_back(rand_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    with ExitStack() as stack:
        first, process = stack.enter_context(engine_host(rand_folder, keys))
        second, drained = stack.enter_context(engine_host(rand_folder, keys))
        texts = tmp_path / "texts"
        shutil.copytree(rand_folder, texts, ignore=shutil.ignore_patterns("*.safetensors"))  # needs no weights
        words = [str(texts), "--engine", first, "--engine", second, "--engine-keys", str(keys)]
        gateway = stack.enter_context(started([*words, "--disable-access-log"]))
        assert not any(
            "transport.host" in " ".join(p.cmdline()) for p in psutil.Process(gateway.process.pid).children()
        )
        gateway.wait_for(lambda: gateway.metric("qiao:engine_up") == 2)
        assert ask(gateway).json()["choices"][0]["text"] == "ok"
        answers: list[httpx.Response] = []
        long = {"cache_salt": "endless", "max_tokens": 200}
        threads = [threading.Thread(target=lambda: answers.append(ask(gateway, **long))) for _ in range(2)]
        for thread in threads:
            thread.start()
        # Both have tokens by then, so that the one whose engine goes is not sent again; neither is near its end.
        gateway.wait_for(lambda: gateway.metric("vllm:generation_tokens_total") > 60)
        assert gateway.metric("vllm:num_requests_running") == 2
        process.kill()
        assert {ask(gateway).status_code for _ in range(10)} == {200}
        for thread in threads:
            thread.join()
        assert sorted(answer.status_code for answer in answers) == [200, 503]
        drained.send_signal(signal.SIGTERM)
        stack.enter_context(engine_host(rand_folder, keys, first))  # somebody has started it again, where it was
        gateway.wait_for(lambda: gateway.metric("qiao:engine_up") == 1 and drained.poll() == 0)
        assert ask(gateway).json()["choices"][0]["text"] == "ok"
        assert gateway.http().get("/health").status_code == 200
