"""Runs code in Triton's environment, each piece in a process of its own: one process either interprets or compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def triton_python() -> str:
    """The environment's interpreter, made where it is not there; skips where Triton cannot be had."""
    done = subprocess.run([sys.executable, str(HERE / "environment.py")], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"Triton could not be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return str(HERE / ".venv" / "bin" / "python")


Run = Callable[..., str]


@pytest.fixture
def run(triton_python: str) -> Run:
    """``run(code, interpret=True)`` returns what the code printed; arguments go to ``sys.argv``."""

    def call(code: str, *arguments: str, interpret: bool = True) -> str:
        paths = [str(HERE / "interpreted"), str(HERE / "src"), os.environ.get("PYTHONPATH", "")]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("QIAO_", "TRITON_"))}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        env |= {"TRITON_DEFAULT_FP_FUSION": "1", **({"TRITON_INTERPRET": "1"} if interpret else {})}
        command = [triton_python, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return call
