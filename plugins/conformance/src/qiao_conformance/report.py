"""A run of the kit as one archive that a user can attach to an issue: results, coverage, versions, and nothing else."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import re
import socket
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_OF_INTEREST = re.compile(r"^(qiao|torch|triton|flashinfer|pluggy|numpy|transformers|hypothesis|pytest)([-_.].*)?$")

README = """What `qiao conformance` found, for an issue about a plugin.

report.json    the run: device, SDK versions that the plugin names, every failed check with its message, speeds
coverage.json  operator by operator, chip by chip
versions.json  operating system, processor type, Python, and the packages that matter

No environment variables, no file names of yours, no user or host name are in here.
"""


def versions() -> dict[str, Any]:
    """Operating system, processor type, Python and the distributions that matter here."""
    packages = {d.name: d.version for d in metadata.distributions() if _OF_INTEREST.match(d.name.lower())}
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items())),
    }


def _private() -> Iterator[tuple[str, str]]:
    """What stands for this machine and its user, longest first, with what is written instead."""
    found = {str(Path.cwd()): "<here>", str(Path.home()): "<home>", socket.gethostname(): "<host>"}
    found |= {os.environ.get(name, ""): f"<{name}>" for name in ("VIRTUAL_ENV", "TMPDIR", "PYTHONPATH")}
    with contextlib.suppress(KeyError, OSError):  # no name for this user id
        found[getpass.getuser()] = "<user>"
    yield from sorted(((k, v) for k, v in found.items() if len(k) > 1), key=lambda pair: -len(pair[0]))


def scrub(text: str) -> str:
    """``text`` without this machine's and its user's names and without the folders of files."""
    for private, instead in _private():
        text = re.sub(rf"(?<![\w-]){re.escape(private)}(?![\w-])", instead, text)
    return re.sub(r"(?<![\w<>/.])(?:/[\w.+@-]+){2,}/([\w.+@-]+)", r"<path>/\1", text)


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, Mapping):
        return {key: _scrubbed(x) for key, x in value.items()}
    return [_scrubbed(x) for x in value] if isinstance(value, list) else value


def pack(path: Path, run: Mapping[str, Any], coverage: Mapping[str, Any] | None) -> None:
    """Write the archive: the ``run`` as ``Results.as_dict`` has it, and the coverage file where there is one."""
    members = {"report.json": run, "versions.json": versions()}
    if coverage is not None:
        members["coverage.json"] = coverage
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("README.txt", README)
        for name, value in members.items():
            archive.writestr(name, json.dumps(_scrubbed(value), indent=1, ensure_ascii=False) + "\n")
