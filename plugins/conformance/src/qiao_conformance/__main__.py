"""``python -m qiao_conformance NAME``: the kit with a progress bar, which ``qiao conformance`` runs as a child."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from qiao_conformance import coverage, pytest_plugin, report
from qiao_conformance.kit import EXAMPLES, target_of

_SHOWN = 12
"""Failures printed; the rest are counted."""


class _Watcher:
    """Draws the bar, and notes which check runs, so that one that brings the process down is known."""

    def __init__(self, console: Console, trace: Path | None) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("conformance", total=None)
        self._trace, self.config = trace, None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._progress.update(self._task, total=len(session.items))
        self._progress.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._trace is not None:
            self._trace.write_text(nodeid.rpartition("::")[2], encoding="utf-8")
        self._progress.update(self._task, description=nodeid.rpartition("::")[2][:48])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._progress.advance(self._task)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._progress.stop()
        self.config = session.config


def parser() -> argparse.ArgumentParser:
    """The options, the same as those of ``qiao conformance``."""
    made = argparse.ArgumentParser(prog="qiao conformance", description=__doc__)
    made.add_argument("device")
    made.add_argument("--level", default="device", help="and HOOK=LEVEL after a comma where a hook is there otherwise")
    made.add_argument("--select", default="", help="as pytest's -k")
    made.add_argument("--examples", type=int, default=EXAMPLES)
    made.add_argument("--performance", action="store_true")
    made.add_argument("--coverage", type=Path)
    made.add_argument("--report", type=Path)
    made.add_argument("--json", action="store_true")
    made.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    return made


def pytest_arguments(options: argparse.Namespace, file: Path) -> list[str]:
    """What pytest gets: the kit alone, without the project's settings and other plugins of pytest."""
    found = ["-c", os.devnull, "--rootdir", str(Path(__file__).parent), "-p", "no:cacheprovider", "-p", "no:terminal"]
    found += ["--import-mode=importlib", "--qiao-device", options.device, "--qiao-level", options.level]
    found += ["--qiao-examples", str(options.examples), "--qiao-coverage", str(file)]
    found += ["--qiao-performance"] if options.performance else []
    return found + (["-k", options.select] if options.select else [])


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; 0 where all checks passed, 1 where one failed, 2 where the device cannot be tested."""
    options = parser().parse_args(argv)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    errors = Console(stderr=True)
    watcher = _Watcher(errors, options.trace)
    with tempfile.TemporaryDirectory() as folder:
        file = options.coverage or Path(folder) / "coverage.json"
        status = pytest.main(pytest_arguments(options, file), plugins=[pytest_plugin, watcher])
        if watcher.config is None or status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
            return 2
        results, target = pytest_plugin.results_of(watcher.config), target_of(watcher.config)
        run = results.as_dict(target, coverage.read_levels(options.level)[0])
        made = json.loads(file.read_text(encoding="utf-8")) if file.exists() and not results.partial else None
    if options.report:
        report.pack(options.report, run, made)
    if options.json:
        json.dump({**run, "coverage": made}, sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        _show(run, made, options)
    if not results.passed and not results.failures:
        errors.print("no check was run", markup=False)
        return 2
    return 0 if results.ok else 1


def _show(run: dict[str, Any], made: dict[str, Any] | None, options: argparse.Namespace) -> None:
    print(f"{run['device']['name']} ({run['device']['torch_device']}), {run['evidence']}")
    for hook, chip in _operators(made):
        print(f"  {hook:20} {chip}")
    for line in run["looser"]:
        print(f"looser by the plugin's wish: {line['hook']} {line['dtype']} atol {line['atol']} rtol {line['rtol']}")
    for line in run["performance"]:
        print(f"{line['microseconds']:>12,.1f} us {line['bytes_per_second'] / 1e9:>9.3f} GB/s  {line['case']}")
    for failure in run["failures"][:_SHOWN]:
        print(f"\nFAILED {failure['check']}\n  " + failure["message"].replace("\n", "\n  "))
    if len(run["failures"]) > _SHOWN:
        print(f"\nand {len(run['failures']) - _SHOWN} more; --json shows all")
    print(f"\n{run['passed']} checks passed, {run['failed']} failed, {run['skipped']} skipped in {run['seconds']} s")
    if options.coverage:
        print(f"wrote {options.coverage}" if made else f"{options.coverage} is not written: this run left checks out")
    if options.report:
        print(f"wrote {options.report}: attach it to an issue")


def _operators(made: dict[str, Any] | None) -> list[tuple[str, str]]:
    chips = made["chips"].values() if made else ()
    return [(name, coverage.cell(entry)) for chip in chips for name, entry in chip["operators"].items()]


if __name__ == "__main__":
    sys.exit(main())
