"""Chips and their memory, as each vendor's own monitoring command prints them.

Which command, and how to read it, is data (``monitor`` in ``known_drivers.json``): patterns with the groups ``index``,
``die``, ``name``, ``health``, ``used`` and ``total`` (MiB, a second pair as ``used2`` and ``total2``). What several
patterns say about one index is joined.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TIMEOUT = 20.0
"""Seconds for one command; some ask each card in turn."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip. ``label`` is what the vendor counts by; memory in bytes, ``total`` 0 where it is not told.

    ``health`` is the vendor's word, empty where there is none; ``healthy`` whether it is the good one. ``family`` says
    what the name stands for where that is known.
    """

    label: str
    name: str
    family: str
    used: int
    total: int
    health: str
    healthy: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """What a monitoring command said: ``chips``, the ``driver`` version, and in ``problem`` why there are no chips."""

    command: str = ""
    chips: tuple[Chip, ...] = ()
    driver: str = ""
    problem: str = ""


Ask = Callable[[Sequence[str], Sequence[str]], tuple[int, str] | None]
"""Runs a command found on PATH or in the folders; (exit status, output), None where there is no such command."""


def ask(command: Sequence[str], folders: Sequence[str]) -> tuple[int, str] | None:
    """Run ``command`` and wait for it. A command that hangs or cannot be started gives status -1 and the reason."""
    found = shutil.which(command[0]) or shutil.which(command[0], path=os.pathsep.join(folders))
    if found is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - a vendor's own tool, named by our data
            [found, *command[1:]], capture_output=True, text=True, timeout=TIMEOUT, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {TIMEOUT:g} s"
    except OSError as error:
        return -1, str(error)
    return done.returncode, done.stdout or done.stderr


def read(entry: Mapping[str, Any] | None, run: Ask = ask) -> Reading:
    """Ask the command of ``entry`` (the ``monitor`` of one accelerator); an empty reading where there is none."""
    if entry is None:
        return Reading()
    answer = run(entry["command"], entry.get("folders", ()))
    if answer is None:
        return Reading()
    status, text = answer
    chips = parse(entry, text) if status == 0 else ()
    driver = re.search(entry["driver"], text, re.MULTILINE) if entry.get("driver") and chips else None
    problem = "" if chips else next((line.strip() for line in text.splitlines() if line.strip()), "it printed nothing")
    return Reading(" ".join(entry["command"]), chips, driver.group(1) if driver else "", problem)


def parse(entry: Mapping[str, Any], text: str) -> tuple[Chip, ...]:
    """The chips in a monitoring command's output, in its order."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for pattern in entry["chips"]:
        for match in re.finditer(pattern, text, re.MULTILINE):
            groups = {key: value.strip() for key, value in match.groupdict().items() if value is not None}
            found.setdefault((groups["index"], groups.get("die", "")), {}).update(groups)
    cards = Counter(index for index, _ in found)
    return tuple(
        _chip(entry, f"{index}/{die}" if cards[index] > 1 else index, groups)
        for (index, die), groups in found.items()
        if "name" in groups
    )


def _chip(entry: Mapping[str, Any], label: str, groups: Mapping[str, str]) -> Chip:
    pairs = [(_mebibytes(groups.get(f"total{n}")), _mebibytes(groups.get(f"used{n}"))) for n in ("", "2")]
    total, used = max(pairs)  # chips with two kinds of memory print 0 for the one that they do not have
    name, health = groups["name"], groups.get("health", "")
    family = next((text for pattern, text in entry.get("families", {}).items() if re.search(pattern, name)), "")
    return Chip(label, name, family, used, total, health, not health or health in entry["healthy"])


def _mebibytes(text: str | None) -> int:
    return int(text) << 20 if text is not None and text.isdigit() else 0
