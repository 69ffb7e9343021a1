"""What ``qiao doctor`` looks at, as plain data."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from qiao.engine.memory import memory_limit
from qiao.observability.drivers import find_drivers, installed, known_drivers
from qiao.observability.machine import open_files_limit, read_cpu

CHILD_TIMEOUT = 120.0
"""Seconds for importing torch and probing all plugins."""

_LIBRARIES = ("transformers", "safetensors", "gguf", "msgspec", "fastapi", "uvicorn")
_COMPILERS = ("c++", "g++", "clang++")


def gather(port: int, root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Everything the doctor knows, JSON-ready. ``port`` is the one that a server would listen on."""
    env = os.environ if environment is None else environment
    memory = memory_limit(root)
    return {
        "schema": 1,
        "cpu": {**asdict(cpu := read_cpu(root)), "effective": cpu.effective},
        "memory": {"bytes": memory.bytes, "free": memory.free, "explanation": memory.explanation},
        "limits": {"open_files": open_files_limit()},
        "system": {
            "os": platform.platform(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "compiler": next((path for name in _COMPILERS if (path := shutil.which(name))), ""),
        },
        "distributions": distributions(),
        "drivers": [asdict(driver) for driver in find_drivers(root, env)],
        "exclusive": [name for name in known_drivers()["exclusive_distributions"] if installed(name)],
        "packages": {e["package"]: installed(e["package"]) for e in known_drivers()["accelerators"] if e["package"]},
        "torch_packages": {n: installed(n) for e in known_drivers()["accelerators"] for n in e["torch"]},
        "port": {"number": port, "busy": port_busy(port)},
        **probed(),
    }


def distributions() -> dict[str, str]:
    """Installed versions of Qiao's distributions and of the libraries that matter, by name."""
    own = {d.name: d.version for d in metadata.distributions() if (d.name or "").lower().startswith("qiao")}
    return {**dict(sorted(own.items())), **{n: v for n in ("torch", *_LIBRARIES) if (v := installed(n))}}


def port_busy(port: int) -> bool:
    """Whether another program listens on ``port``."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except PermissionError:
            return False
        except OSError:
            return True
    return False


def probed(timeout: float = CHILD_TIMEOUT) -> dict[str, Any]:
    """torch, plugins, device and plan, found out in a process of their own (see ``doctor_child``).

    Where that process dies or hangs, each plugin is tried alone, and the culprit's verdict says how it ended.
    """
    result, fate = _run_child([], timeout)
    if result is not None:
        return result
    from qiao.registry import allowed_plugins, discover

    plugins: list[dict[str, Any]] = []
    torch: dict[str, Any] = {"error": fate}
    for record in discover(allowed_plugins(os.environ)).records:
        alone, how = _run_child(["--plugin", record.name], timeout)
        if alone is not None:
            torch = alone["torch"]
            plugins += alone.get("plugins", [])
            continue
        plugins.append(
            {
                "name": record.name,
                "distribution": record.distribution,
                "version": record.version,
                "status": "crashed",
                "verdict": how,
                "hooks": 0,
                "devices": [],
            }
        )
    return {"torch": torch, "plugins": plugins, "device": {"error": fate}}


def _run_child(extra: list[str], timeout: float) -> tuple[dict[str, Any] | None, str]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        command = [sys.executable, "-m", "qiao.cli.doctor_child", str(target), *extra]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)  # noqa: S603
        except subprocess.TimeoutExpired:
            return None, f"no answer within {timeout:g} s"
        if done.returncode == 0 and target.exists():
            return msgspec.json.decode(target.read_bytes()), ""
        return None, _fate(done.returncode, done.stderr)


def _fate(code: int, stderr: str) -> str:
    last = (stderr.strip().splitlines() or [""])[-1]
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the process was ended by {name}" + (f": {last}" if last else "")
    return f"the process ended with status {code}" + (f": {last}" if last else "")
