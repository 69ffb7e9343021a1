"""Start, death of the engine, drain and exit, with real processes and the scripted engine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from qiao.errors import ParameterError
from qiao.server.args import ServerArgs
from qiao.server.start import bind, check_tls, free_after_end

from tests.support.server import DIE, RunningServer, chain, scripted

ENDLESS = dict.fromkeys(range(260), 97)


@pytest.fixture
def slow(rand_folder: Path) -> Iterator[RunningServer]:
    """One token about every 2 ms."""
    flags = ("--shutdown-timeout", "20")
    with scripted(*flags, model=rand_folder, tables={"endless": ENDLESS}, table=chain("x>ok"), pause=0.002) as running:
        yield running


def background(running: RunningServer, **body: Any) -> tuple[threading.Thread, list[httpx.Response]]:
    """Send a request from a thread; the answer arrives in the list."""
    answers: list[httpx.Response] = []
    given = {"prompt": "hi", "cache_salt": "endless", "ignore_eos": True, **body}

    def send() -> None:
        with contextlib.suppress(httpx.TransportError):  # a server that is killed answers nothing
            answers.append(running.http().post("/v1/completions", json=given))

    thread = threading.Thread(target=send)
    thread.start()
    return thread, answers


def children(running: RunningServer) -> list[psutil.Process]:
    return psutil.Process(running.process.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=60)
    return all(p.status() == psutil.STATUS_ZOMBIE for p in alive)


def test_sigterm_lets_running_requests_finish(slow: RunningServer) -> None:
    """B120: both kinds of answer arrive whole, new connections are refused, status 0, no child is left."""
    plain, answers = background(slow, max_tokens=200)
    engine = children(slow)
    url = slow.url
    with slow.http().stream(
        "POST", "/v1/completions", json={"prompt": "hi", "cache_salt": "endless", "max_tokens": 200, "stream": True}
    ) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        slow.wait_for(lambda: slow.metric("vllm:num_requests_running") == 2)
        slow.process.send_signal(signal.SIGTERM)
        slow.wait_for(lambda: refused(url))
        rest = [line for line in lines if line]
    plain.join()
    assert rest[-1] == "data: [DONE]"
    texts = [json.loads(line.removeprefix("data: ")) for line in [first, *rest[:-1]]]
    assert len("".join(t["choices"][0]["text"] for t in texts)) == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 200
    assert slow.process.wait(60) == 0
    assert gone(engine)


def refused(url: str) -> bool:
    try:
        return httpx.get(url + "/health", trust_env=False).status_code == 503
    except httpx.ConnectError:
        return True
    except (httpx.ReadError, httpx.RemoteProtocolError):  # was in the listener's queue when that was closed: ask again
        return False


def test_what_outlives_the_drain_time_gets_an_error(rand_folder: Path) -> None:
    with scripted("--shutdown-timeout", "0", model=rand_folder, tables={"endless": ENDLESS}, pause=0.05) as running:
        plain, answers = background(running, max_tokens=400)
        body = {"prompt": "hi", "cache_salt": "endless", "max_tokens": 400, "stream": True}
        with running.http().stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.wait_for(lambda: running.metric("vllm:num_requests_running") == 2)
            # As a terminal that closes does; whoever runs these tests may have had it ignored.
            hangs_up = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
            running.process.send_signal(signal.SIGHUP if hangs_up else signal.SIGTERM)
            rest = [line for line in lines if line]
        plain.join()
        assert rest[-1] == "data: [DONE]"
        assert "shutting down" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
        assert answers[0].status_code == 503
        assert running.process.wait(60) == 0


def test_a_second_signal_ends_at_once(slow: RunningServer) -> None:
    thread, answers = background(slow, max_tokens=100000 // 250)
    engine = children(slow)
    slow.wait_for(lambda: slow.metric("vllm:num_requests_running") == 1)
    slow.process.send_signal(signal.SIGINT)
    slow.wait_for(lambda: any("draining" in line for line in slow.log))
    slow.process.send_signal(signal.SIGTERM)
    assert slow.process.wait(60) == 128 + signal.SIGTERM
    assert gone(engine)
    thread.join()
    assert not answers or answers[0].status_code == 200


def test_a_dead_engine_is_reported_and_replaced_and_dies_with_a_killed_server(slow: RunningServer) -> None:
    thread, answers = background(slow, max_tokens=400)
    slow.wait_for(lambda: slow.metric("vllm:num_requests_running") == 1)
    with pytest.raises(openai.InternalServerError, match="SIGKILL") as error:
        slow.openai().completions.create(model="M", prompt=[DIE])
    assert error.value.status_code == 503
    thread.join()
    assert answers[0].status_code == 503, "it had output, so that it cannot be sent again"
    assert answers[0].json()["error"]["code"] == "engine_unavailable"
    unhealthy = slow.http().get("/health")
    assert unhealthy.status_code == 503
    assert "SIGKILL" in unhealthy.json()["error"]["message"]
    slow.wait_for(lambda: slow.http().get("/health").status_code == 200)
    assert slow.openai().completions.create(model="M", prompt="x").choices[0].text == "ok"
    assert slow.metric("qiao:engine_restarts") == 2, "a request without output is sent once more"
    engine = children(slow)
    assert engine
    slow.process.kill()
    assert gone(engine)


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    known = {k: v for k, v in os.environ.items() if k not in ("QIAO_API_KEY", "VLLM_API_KEY")}
    return subprocess.Popen(
        [sys.executable, "-m", "qiao.server", *words], stderr=subprocess.PIPE, text=True, env={**known, **environment}
    )


def test_a_model_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    with start(str(tmp_path), "--port", "0") as process:
        _, log = process.communicate(timeout=180)
    assert process.returncode == 2
    assert "qiao: error:" in log
    assert str(tmp_path) in log.splitlines()[-1]
    assert "Traceback" not in log


def test_sigterm_while_loading(rand_folder: Path) -> None:
    """B120, last part: the engine is still importing when the signal comes."""
    with start(str(rand_folder), "--port", "0") as process:
        parent = psutil.Process(process.pid)
        while not (engine := parent.children(recursive=True)):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=180)
    assert process.returncode == 0, log
    assert "stopped while loading" in log
    assert gone(engine)


def test_a_port_in_use_is_known_before_loading(rand_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with start(str(rand_folder), "--port", str(taken.getsockname()[1])) as process:
            _, log = process.communicate(timeout=180)
    assert process.returncode == 2
    assert "--port: cannot bind" in log
    assert "Traceback" not in log


def test_keys_do_not_reach_the_log(rand_folder: Path) -> None:
    with start(str(rand_folder), "--port", "-1", QIAO_API_KEY="sk-hidden") as process:
        _, log = process.communicate(timeout=180)
    assert process.returncode == 2
    assert "sk-hidden" not in log


def test_a_port_belongs_to_the_first_that_loads_and_is_free_after_its_end() -> None:
    """Before anyone listens on it, too; and while connections that it closed linger."""
    with bind(ServerArgs(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ParameterError, match="--port: cannot bind"):
            bind(ServerArgs(port=port))
        free_after_end(first)
        first.listen()
        with socket.create_connection(("127.0.0.1", port)) as client:
            first.accept()[0].close()  # the side that closes first keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    bind(ServerArgs(port=port)).close()


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate of its own and its key, as files."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*words, "-keyout", str(key), "-out", str(cert), *subject], check=True, capture_output=True)
    return str(cert), str(key)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_tls_files_are_tried_before_a_model_loads_and_then_used(rand_folder: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "one")
    _, other = certificate(tmp_path, "two")
    bad, locked = tmp_path / "bad.pem", tmp_path / "locked.key"
    bad.write_text("nonsense")
    lock = ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", key, "-out", str(locked)]
    subprocess.run(lock, check=True, capture_output=True)
    good = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": cert}
    check_tls(ServerArgs(**good))
    check_tls(ServerArgs())
    for field, value, text in [
        ("ssl_certfile", "missing.pem", "--ssl-certfile: cannot use missing.pem: No such file"),
        ("ssl_certfile", str(tmp_path), "--ssl-certfile: cannot use .*: Is a directory"),
        ("ssl_keyfile", "missing.key", "--ssl-keyfile: cannot use missing.key: No such file"),
        ("ssl_keyfile", str(bad), "--ssl-keyfile: cannot use .*; it must be PEM"),
        ("ssl_keyfile", other, "--ssl-keyfile: cannot use .*KEY_VALUES_MISMATCH"),
        ("ssl_keyfile", str(locked), "--ssl-keyfile: cannot use .* passphrase"),
        ("ssl_ca_certs", str(bad), "--ssl-ca-certs: cannot use .*; it must be PEM"),
    ]:
        with pytest.raises(ParameterError, match=text):
            check_tls(ServerArgs(**{**good, field: value}))
    with scripted("--ssl-certfile", cert, "--ssl-keyfile", key, model=rand_folder) as running:
        assert running.url.startswith("https://")
        with httpx.Client(verify=ssl.create_default_context(cafile=cert), trust_env=False) as client:
            assert client.get(running.url + "/health").status_code == 200
