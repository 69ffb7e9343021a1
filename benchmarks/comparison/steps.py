"""Steps of ``setup``: each runs once, says what it does and how long it took, and is skipped when done."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

BUILD_LINE = re.compile(rb"\[(\d+)/(\d+)\]")


def step(title: str, done: Path, action: Callable[[], None]) -> None:
    """Run ``action`` unless the file ``done`` exists, and then make it. ``done`` lies beside what the step made."""
    if done.exists():
        print(f"  have  {title}")
        return
    print(f"  make  {title}", flush=True)
    start = time.monotonic()
    action()
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()
    print(f"  done  {title} ({time.monotonic() - start:.0f} s)", flush=True)


def made(target: Path, title: str, action: Callable[[Path], None]) -> None:
    """A step that makes the file or folder ``target``.

    ``action`` gets another place, moved to ``target`` at the end, so that what a broken run leaves is never taken for
    a finished one.
    """
    if target.exists():
        print(f"  have  {title}")
        return
    part = target.with_name(f".part-{target.name}")
    if part.is_dir():
        shutil.rmtree(part)
    part.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"  make  {title}", flush=True)
    start = time.monotonic()
    action(part)
    part.rename(target)
    print(f"  done  {title} ({time.monotonic() - start:.0f} s)", flush=True)


def run(command: Sequence[object], log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    """Run a program with its output in ``log``; lines such as ``[12/226]`` of a build are shown as progress.

    Raises ``SystemExit`` with the end of the log where the program fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in command]
    environment = {**os.environ, **(env or {})}
    environment.pop("PYTHONPATH", None)
    with log.open("ab", buffering=0) as file:
        file.write(f"$ {' '.join(words)}\n".encode())
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=cwd)
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            _progress(line)
        status = process.wait()
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if status:
        tail = log.read_text(errors="replace")[-1500:]
        raise SystemExit(f"{tail}\n\n{words[0]} ended with status {status}; the whole log: {log}")


def _progress(line: bytes) -> None:
    """Show how far a build is: in place on a terminal, else every 25 files."""
    found = BUILD_LINE.search(line)
    if not found:
        return
    now, total = int(found[1]), int(found[2])
    if sys.stderr.isatty():
        print(f"\r        {now} of {total}", end="", file=sys.stderr, flush=True)
    elif now % 25 == 0:
        print(f"        {now} of {total}", file=sys.stderr, flush=True)
