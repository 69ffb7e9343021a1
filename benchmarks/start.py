"""Seconds from the command to a server that is ready, and its memory then.

python benchmarks/start.py MODEL [--runs 5] [--cold] [--json FILE] [-- more flags of qiao serve]

The first run may make packed weights and is left out. ``--cold`` asks the system before each run to forget the files
that a start reads (of this interpreter's libraries and of the model), as after a reboot; what others use stays.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from comparison.processes import proportional_mib

SERVE = "from qiao.cli.main import main; main()"
PATIENCE = 120.0
"""Seconds that a start may take."""


def healthy(port: int) -> bool:
    """Whether ``/health`` answers 200."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.recv(64).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(model: str, flags: list[str]) -> tuple[float, float]:
    """Seconds until ``/health`` answers 200, and MiB (PSS) of both processes then. Raises ``SystemExit``."""
    port = free_port()
    command = [sys.executable, "-c", SERVE, "serve", model, "--device", "cpu", "--port", str(port), *flags]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not healthy(port):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
            if time.perf_counter() - began > PATIENCE:
                raise SystemExit(f"not ready after {PATIENCE:.0f} s")
            time.sleep(0.005)
        return time.perf_counter() - began, proportional_mib(process.pid)
    finally:
        process.terminate()
        process.wait()


def forget(paths: Iterable[Path]) -> None:
    """Drop the files below ``paths`` from the page cache, as far as nobody has them mapped."""
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file():
                with file.open("rb") as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="of qiao serve, after --")
    asked = parser.parse_args()
    start(asked.model, asked.flags)
    files = [Path(folder) for folder in sys.path if folder.endswith("site-packages")] + [Path(asked.model)]
    files.append(Path("~/.cache/qiao/packed").expanduser())
    seconds, memory = [], []
    for number in range(asked.runs):
        if asked.cold:
            forget(files)
        took, mib = start(asked.model, asked.flags)
        print(f"run {number}: ready after {took:.2f} s, {mib:.0f} MiB", flush=True)
        seconds.append(took)
        memory.append(mib)
    print(f"median {statistics.median(seconds):.2f} s, least {min(seconds):.2f} s")
    if asked.json:
        facts = {"model": asked.model, "cold": asked.cold, "seconds": seconds, "pss_mib": memory}
        asked.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
