"""``benchmarks/device.sh`` with programs that only note what they are asked: each step runs, with commands that are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from qiao.cli.main import build_app

from tests.support.source import ROOT

PYTHON = """#!/bin/sh
echo "python $*" >>"$NOTES"
case "$*" in
*"-m venv"*) for last in "$@"; do :; done
    mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; cp "$QIAO" "$last/bin/qiao" ;;
*"import torch"*) echo "torch==2.7.0+cu128" ;;
*"-m pytest"*) echo "9 passed" ;;
*"-m pip"*) ;;
*) exec "$REAL" "$@" ;;
esac
"""

QIAO = """#!/bin/sh
echo "qiao $*" >>"$NOTES"
case "$1" in
conformance) for word in "$@"; do [ "$before" = --coverage ] && file=$word; before=$word; done
    echo '{}' >"$file"; echo "wrote $file"; exit "$KIT" ;;
serve) exec "$REAL" -c '
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200 if self.path == "/health" else 404); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()' "$6" ;;
bench) echo '{"requests": 64}' ;;
esac
"""


def ran(folder: Path, device: str, kit: int = 0) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    for name, text in (("python", PYTHON), ("qiao", QIAO)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    notes = folder / "notes"
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(folder / "python"), "QIAO": str(folder / "qiao")}
    environment |= {"OUT": str(folder / "out"), "NOTES": str(notes), "REAL": sys.executable, "KIT": str(kit)}
    command = ["bash", str(ROOT / "benchmarks/device.sh"), device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    return done, [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []


def parsed(words: list[str]) -> None:
    """Raises ``click.UsageError`` where Qiao has no such command or option."""
    group = typer.main.get_command(build_app())
    with group.make_context("qiao", list(words), resilient_parsing=False) as context:
        name, command, rest = group.resolve_command(context, list(words))
        command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("device", ["cuda", "dcu", "sim"])
def test_every_step_runs_with_commands_that_there_are(device: str, tmp_path: Path) -> None:
    done, notes = ran(tmp_path, device)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = [words[1:] for words in notes if words[0] == "qiao"]
    assert [words[0] for words in asked] == ["doctor", "plugins", "conformance", "plan", "serve", "bench"]
    for words in asked:
        parsed(words)
    installs = [words for words in notes if "pip" in words]
    folders = [word for words in installs for word in words if word.startswith(".")]
    assert all((ROOT / folder / "pyproject.toml").is_file() for folder in folders)
    assert (f"./plugins-{device}" in folders) == (device != "sim")
    assert any("torch" in words for words in installs) == (device == "cuda"), "the torch of an image stays"
    assert any("--system-site-packages" in words for words in notes) == (device != "cuda")
    assert any("xdist" in word or word == "-n" for words in notes if "pytest" in words for word in words) == (
        device != "dcu"
    )
    out = tmp_path / "out"
    assert (out / "constraints.txt").read_text() == "torch==2.7.0+cu128\n"
    assert "64" in (out / "bench.json").read_text()
    keep = f"cp {out}/coverage.json plugins-{device}/src/qiao_{device}/coverage.json"
    assert (keep in done.stdout) == (device != "sim")


def test_a_kit_that_fails_is_the_status_and_the_rest_runs(tmp_path: Path) -> None:
    done, notes = ran(tmp_path, "cuda", kit=1)
    assert done.returncode == 1
    assert [words[1] for words in notes if words[0] == "qiao"][-2:] == ["serve", "bench"]


def test_without_a_device_it_says_how_it_is_called(tmp_path: Path) -> None:
    done, notes = ran(tmp_path, "tpu")
    assert done.returncode == 2 and not notes
    assert "benchmarks/device.sh cuda" in done.stdout and "set -euo" not in done.stdout
