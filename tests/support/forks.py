"""Checks that each need a process of their own, without paying for its imports each time.

A parent imports what is slow once (code from its command line) and then forks for each request: a line of JSON on its
standard input with ``code``, ``environment`` to set and ``seconds`` of processor time to take. The answer is a line
with ``status``, ``output`` and ``errors``. What is preloaded must not start threads nor touch a device.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any, BinaryIO

LATE = 124
"""Status of what took too long, as timeout(1) has it."""


class Forks:
    """The parent, as a context manager; ``environment`` is all that it and its children have at their start."""

    def __init__(self, preload: str, environment: Mapping[str, str]) -> None:
        self._preload, self._environment = preload, dict(environment)

    def __enter__(self) -> Forks:
        """Start it; the imports run while the caller goes on."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._preload],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *args: object) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)

    def run(self, code: str, environment: Mapping[str, str], seconds: int = 120) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in a child; raises ``RuntimeError`` where the parent has ended."""
        request = {"code": code, "environment": dict(environment), "seconds": seconds}
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"what was to be preloaded failed (status {self._process.wait(10)}): {self._preload}")
        answer = json.loads(line)
        return subprocess.CompletedProcess(code, answer["status"], answer["output"], answer["errors"])


def _late(number: int, frame: FrameType | None) -> None:
    os._exit(LATE)


def _child(request: Mapping[str, Any], output: BinaryIO, errors: BinaryIO) -> None:
    """Never returns."""
    status = 1
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        signal.signal(signal.SIGPROF, _late)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        os.environ.update(request["environment"])
        exec(compile(request["code"], "<check>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _forked(request: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            _child(request, output, errors)
        _, ended = os.waitpid(child, 0)
        output.seek(0)
        errors.seek(0)
        return {
            "status": os.waitstatus_to_exitcode(ended),
            "output": output.read().decode(errors="replace"),
            "errors": errors.read().decode(errors="replace"),
        }


def main() -> None:
    """Preload, then a child for each line until there are no more."""
    sys.path.pop(0)  # this file's folder
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    exec(compile(sys.argv[1], "<preload>", "exec"), {"__name__": "preload"})
    for line in sys.stdin:
        answers.write(json.dumps(_forked(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
