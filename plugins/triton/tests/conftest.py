"""Runs code in Triton's environment: one process either interprets or compiles, and a copy of it runs each piece."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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


# Imports take seconds, a fork takes none: what a piece changes is gone with it.
SERVER = """
import json, os, sys, tempfile, traceback
import qiao_triton.builds, qiao_triton.kernels
if os.environ.get("TRITON_INTERPRET"):
    import qiao_conformance.kit, qiao_reference, qiao_triton_interpreted
else:
    import qiao_triton.compiled
for line in sys.stdin:
    code, arguments = json.loads(line)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv, status = ["-c", *arguments], 0
            try:
                exec(compile(code, "<piece>", "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            os._exit(status)
        status = os.waitpid(child, 0)[1]
        found = [status]
        for file in (out, err):
            file.seek(0)
            found.append(file.read())
    print(json.dumps(found), flush=True)
"""

Run = Callable[..., str]


def _environment(interpret: bool) -> dict[str, str]:
    paths = [str(HERE / "interpreted"), str(HERE / "src"), os.environ.get("PYTHONPATH", "")]
    found = {k: v for k, v in os.environ.items() if not k.startswith(("QIAO_", "TRITON_"))}
    found |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return found | {"TRITON_DEFAULT_FP_FUSION": "1", **({"TRITON_INTERPRET": "1"} if interpret else {})}


@pytest.fixture(scope="module")
def run(triton_python: str) -> Iterator[Run]:
    """``run(code, interpret=True)`` returns what the code printed; arguments go to ``sys.argv``."""
    servers: dict[bool, subprocess.Popen[str]] = {}

    def call(code: str, *arguments: str, interpret: bool = True) -> str:
        if interpret not in servers:
            command = [triton_python, "-c", SERVER]
            servers[interpret] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(interpret)
            )
        server = servers[interpret]
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps([code, arguments]) + "\n")
        server.stdin.flush()
        status, out, err = json.loads(server.stdout.readline() or '[1, "", "the process ended"]')
        assert status == 0, err[-4000:]
        return str(out)

    yield call
    for server in servers.values():
        server.communicate()
