"""Runs the conformance kit on every plugin of this repository and renews their coverage files: ``make conformance``.

``TARGETS`` is the list to add a plugin or a chip to. A vendor's plugin that needs an environment of its own names its
interpreter; a chip that is chosen by an environment variable names that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from qiao.contract import GROUP

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Target:
    """One chip of one plugin.

    ``level`` is how the device is there (see ``qiao_conformance.coverage.LEVELS``), ``file`` the coverage file from the
    repository's root, ``environment`` what to set, ``path`` a folder with a stand-in for the vendor's packages,
    ``python`` an interpreter other than this one.
    """

    plugin: str
    level: str
    file: str
    environment: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    python: str = sys.executable

    @property
    def missing(self) -> str:
        """Why it cannot be run here, empty where it can."""
        if self.python != sys.executable:
            return "" if Path(self.python).exists() else f"there is no {self.python}"
        names = {point.name for point in metadata.entry_points(group=GROUP)}
        return "" if self.plugin in names else "it is not installed"


_MLU_FILE, _MLU_PATH = "plugins-cambricon/src/qiao_cambricon/coverage.json", "plugins-cambricon/stand_in"
_MLU_CHIPS = ({"QIAO_MLU_CHIP": "MLU590"}, {"QIAO_MLU_CHIP": "MLU370", "QIAO_MLU_OPS": "old"})

TARGETS: tuple[Target, ...] = (
    Target("reference", "device", "plugins/reference/src/qiao_reference/coverage.json"),
    Target("sim", "stand-in", "plugins/conformance/src/qiao_conformance/sim/coverage.json"),
    Target("cpu", "device", "plugins/cpu/src/qiao_cpu/coverage.json"),
    *(Target("cambricon", "stand-in", _MLU_FILE, chip, _MLU_PATH) for chip in _MLU_CHIPS),
)


def run(target: Target, arguments: list[str]) -> bool:
    """Run the kit on ``target``; whether every check passed."""
    command = [target.python, "-m", "qiao_conformance", target.plugin, "--level", target.level]
    command += ["--coverage", str(ROOT / target.file), *arguments]
    environment = {**os.environ, **target.environment}
    if target.path:
        known = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / target.path), *([known] if known else [])])
    return subprocess.run(command, env=environment, check=False).returncode == 0  # noqa: S603 - our own module


def main() -> int:
    """All targets or those of ``--only``; 1 where a check failed or a target asked for by name is not there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="PLUGIN")
    options, rest = parser.parse_known_args()
    bad = []
    for target in TARGETS:
        if options.only and target.plugin not in options.only:
            continue
        print(f"== {' '.join([target.plugin, *target.environment.values()])} ({target.level})", flush=True)
        if target.missing:
            print(f"left out: {target.missing}")
            bad += [target.plugin] if options.only else []
        elif not run(target, rest):
            bad.append(target.plugin)
    print(f"failed: {', '.join(bad)}" if bad else "every plugin passed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
