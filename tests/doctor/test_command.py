"""The command as users run it, on this machine and with broken plugins beside it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from qiao.cli import doctor_facts


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    command = [sys.executable, "-m", "qiao", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, encoding="utf-8", timeout=120, check=False)


def plugin(folder: Path, name: str, body: str) -> None:
    """A distribution ``qiao-NAME`` in ``folder`` whose module runs ``body`` on import."""
    (folder / f"qiao_{name}.py").write_text(body)
    info = folder / f"qiao_{name}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: qiao-{name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[qiao.v1]\n{name} = qiao_{name}\n")


@pytest.fixture(scope="module")
def with_broken_plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    plugin(folder, "abort", "import os\nos.abort()\n")
    plugin(folder, "noisy", "print('hello from an SDK')\nimport module_that_is_not_there\n")
    return folder


def test_report_as_json() -> None:
    done = run("--json", "--port", "8731")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["schema"] == 1
    assert told["ok"] is True
    assert told["cpu"]["cores"] >= 1
    assert told["memory"]["free"] > 0
    assert told["distributions"]["qiao"]
    assert told["torch"]["version"]
    by_name = {p["name"]: p for p in told["plugins"]}
    assert by_name["reference"]["status"] == "ready"
    assert told["device"]["plan"]["operators"]


def test_a_plugin_that_crashes_its_process_is_named_and_harms_no_other(with_broken_plugins: Path) -> None:
    done = run("--json", "--lang", "zh", PYTHONPATH=str(with_broken_plugins))
    told = json.loads(done.stdout)
    by_name = {p["name"]: p for p in told["plugins"]}
    assert by_name["abort"]["status"] == "crashed"
    assert "SIGABRT" in by_name["abort"]["verdict"]
    assert by_name["noisy"]["status"] == "quarantined"
    assert "module_that_is_not_there" in by_name["noisy"]["verdict"]
    assert by_name["reference"]["status"] == "ready"
    assert {"plugin_crashed", "plugin_quarantined"} <= {f["id"] for f in told["findings"]}
    assert done.returncode == 1, "auto would load the plugin that crashes, so serving is not possible as things are"


def test_leaving_the_crashing_plugin_out_helps(with_broken_plugins: Path) -> None:
    done = run(PYTHONPATH=str(with_broken_plugins), QIAO_PLUGINS="reference", LC_ALL="zh_CN.UTF-8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "环境检查" in done.stdout


def test_chinese_on_an_ascii_terminal_does_not_fail() -> None:
    done = run("--lang", "zh", PYTHONIOENCODING="ascii", QIAO_PLUGINS="reference")
    assert done.returncode == 0, done.stderr


def test_unknown_language_is_refused() -> None:
    done = run("--lang", "fr")
    assert done.returncode == 2
    assert "--lang" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_busy_port_is_seen() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert doctor_facts.port_busy(port)
    assert not doctor_facts.port_busy(port)


def test_a_process_that_hangs_is_given_up() -> None:
    result, fate = doctor_facts._run_child([], timeout=0.01)
    assert result is None
    assert "no answer" in fate
