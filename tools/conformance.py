"""Runs the conformance kit on every plugin of this repository and renews their coverage files: ``make conformance``.

What to run stands beside each plugin, in its ``conformance.toml``. Paths in it are relative to its folder; ``{folder}``
in a text is that folder's absolute path::

    [[target]]                              # one for each chip
    plugin = "acme"                         # name of the entry point
    level = "stand-in"                      # see qiao_conformance.coverage.LEVELS
    coverage = "src/qiao_acme/coverage.json"
    name = "X2"                             # shown; without it what ``environment`` holds
    environment = { ACME_CHIP = "X2" }      # to set
    path = ["stand_in"]                     # put in front of PYTHONPATH
    python = ".venv/bin/python"             # an interpreter other than this one
    prepare = ["{python}", "make_venv.py"]  # run once before; where it fails, its last line says why this is left out
    arguments = ["--examples", "10"]        # more for the kit
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from qiao.contract import GROUP

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
FILE = "conformance.toml"


@dataclass(frozen=True)
class Target:
    """One chip of one plugin, as the page of this module says; ``folder`` is the plugin's."""

    folder: Path
    plugin: str
    level: str
    coverage: str
    name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    python: str = ""
    prepare: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        """The coverage file."""
        return self.folder / self.coverage

    @property
    def title(self) -> str:
        """For people."""
        return " ".join([self.plugin, *([self.name] if self.name else self.environment.values())])

    @property
    def interpreter(self) -> str:
        """What runs the kit. Not resolved: an environment's interpreter is a link."""
        return str(self.folder / self.python) if self.python else sys.executable

    @property
    def missing(self) -> str:
        """Why it cannot be run here, empty where it can or where ``prepare`` has to tell."""
        if self.python:
            there = self.prepare or Path(self.interpreter).exists()
            return "" if there else f"there is no {self.interpreter}"
        names = {point.name for point in metadata.entry_points(group=GROUP)}
        return "" if self.plugin in names else "it is not installed"

    def filled(self, text: str) -> str:
        """``text`` with the folder and this interpreter in their places."""
        return text.replace("{folder}", str(self.folder)).replace("{python}", sys.executable)


def read(file: Path) -> list[Target]:
    """The targets of one ``conformance.toml``; raises ``ValueError`` naming the file for one that cannot be read."""
    known = {f.name for f in fields(Target)} - {"folder"}
    found = []
    for entry in tomllib.loads(file.read_text(encoding="utf-8")).get("target", []):
        if unknown := sorted(set(entry) - known):
            raise ValueError(f"{file}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        if lacking := [name for name in ("plugin", "level", "coverage") if name not in entry]:
            raise ValueError(f"{file}: a target needs {', '.join(lacking)}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        found.append(Target(file.parent, **values))
    return found


def targets(root: Path = ROOT) -> list[Target]:
    """Those of every plugin of the repository: its own first, then the vendors'."""
    return [target for file in _files(root) for target in read(file)]


def _files(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob(f"plugins/*/{FILE}"))
    yield from sorted(root.glob(f"plugins-*/{FILE}"))


def prepared(target: Target, done: dict[tuple[str, ...], str]) -> str:
    """Run the target's ``prepare`` unless ``done`` has it; returns why it failed, empty where it did not."""
    command = tuple(target.filled(part) for part in target.prepare)
    if command and command not in done:
        ran = subprocess.run(command, cwd=target.folder, capture_output=True, text=True, check=False)  # noqa: S603 - ours
        lines = (ran.stderr + ran.stdout).strip().splitlines()
        done[command] = "" if ran.returncode == 0 else (lines[-1] if lines else f"it ended with {ran.returncode}")
    return done.get(command, "")


def run(target: Target, arguments: list[str]) -> bool:
    """Run the kit on ``target``; whether every check passed."""
    command = [target.interpreter, "-m", "qiao_conformance", target.plugin, "--level", target.level]
    command += ["--coverage", str(target.file), *target.arguments, *arguments]
    environment = {**os.environ, **{k: target.filled(v) for k, v in target.environment.items()}}
    first = [str(target.folder / part) for part in target.path]
    paths = [*first, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return subprocess.run(command, env=environment, check=False).returncode == 0  # noqa: S603 - our own module


def main() -> int:
    """All targets or those of ``--only``; 1 where a check failed or a target asked for by name is not there."""
    parser = argparse.ArgumentParser(description="The conformance kit on every plugin here; renews coverage files.")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PLUGIN",
        help="this plugin, or one chip of it ('cambricon MLU370'); may be repeated",
    )
    parser.add_argument("--list", action="store_true", help="say what there is and whether it can run here")
    options, rest = parser.parse_known_args()
    bad, done = [], dict[tuple[str, ...], str]()
    for target in targets():
        if options.only and not {target.plugin, target.title} & set(options.only):
            continue
        print(f"== {target.title} ({target.level})", flush=True)
        missing = target.missing or ("" if options.list else prepared(target, done))
        start = time.monotonic()
        if missing:
            print(f"left out: {missing}")
            bad += [target.title] if options.only and not options.list else []
        elif not options.list:
            bad += [] if run(target, rest) else [target.title]
            print(f"{time.monotonic() - start:.0f} s", flush=True)
    if not options.list:
        print(f"failed: {', '.join(bad)}" if bad else "every plugin that is here passed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
