"""Compiles the Triton kernels for chips that are not here and writes what holds into coverage files, as ``compiled``.

Run after ``tools.conformance``: only an operator whose kernels also pass the kit in the interpreter gets the level.
What is compiled and within which bounds, ``qiao_triton.builds`` and ``qiao_triton.compiled`` say. Hooks without kernels
of their own have the level that they have there.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from qiao.contract import DeviceInfo
from qiao.registry.manager import load_object
from qiao_conformance import coverage
from qiao_conformance.target import Target

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "plugins" / "triton"
LIBRARY = FOLDER / "src" / "qiao_triton" / "coverage.json"

FILES: Mapping[str, tuple[Path, tuple[str, ...]]] = {
    "cuda": (
        ROOT / "plugins-cuda" / "src" / "qiao_cuda" / "coverage.json",
        ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100"),
    ),
    "dcu": (ROOT / "plugins-dcu" / "src" / "qiao_dcu" / "coverage.json", ("gfx906",)),
    "triton": (LIBRARY, ("gfx90a", "gfx942")),
}
"""Plugin -> its file and the chips that are compiled for. The last are AMD's, for which there is no plugin."""

_WITHOUT_KERNELS = ("allocate_kv", "copy_blocks", "swap_blocks", "pack_weight", "capture")


def compiled(architectures: Iterable[str], processes: int) -> list[dict[str, Any]]:
    """What ``qiao_triton.compiled`` found in Triton's environment. Raises ``RuntimeError`` where there is none."""
    made = subprocess.run([sys.executable, str(FOLDER / "environment.py")], check=False)  # noqa: S603 - ours
    if made.returncode:
        raise RuntimeError("Triton could not be installed: see above")
    python = FOLDER / ".venv" / "bin" / "python"
    command = [str(python), "-m", "qiao_triton.compiled", "--json", "--processes", str(processes), *architectures]
    path = os.pathsep.join(filter(None, [str(FOLDER / "src"), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)  # noqa: S603 - ours
    return list(json.loads(done.stdout))


def taken(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many kernels there are, and of what each takes the most and the bound of the one that takes it."""
    parts: dict[str, Any] = {"compiled": len(found)}
    for place, name in enumerate(("shared", "registers", "spilled")):
        parts[name] = list(max((one[name], one["bounds"][place]) for one in found))
    return parts


def entry(
    target: Target, found: Sequence[Mapping[str, Any]], interpreted: Mapping[str, Any], sources: str, date: str
) -> dict[str, Any]:
    """The chip's part of the coverage file: a hook's checks are its kernels, one more is its verdict of the kit.

    ``interpreted`` are the operators of the interpreter's run.
    """
    tallies: dict[str, coverage.Tally] = {}
    for one in found:
        if one["hook"] in target.hooks:
            tally = tallies.setdefault(one["hook"], coverage.Tally())
            tally.add(f"{one['label']} {one['kernel']}", one["dtype"], not one["faults"])
    for hook, tally in tallies.items():
        tally.add("interpreted", "", interpreted.get(hook, {}).get("level") == "interpreted")
    made = coverage.chip_entry(target, tallies, "compiled", date)
    for hook in _WITHOUT_KERNELS:
        if hook in interpreted and _of_the_library(target.hooks.get(hook)):
            known = interpreted[hook]
            dtypes = [dtype for dtype in known["dtypes"] if dtype in target.capabilities.dtypes]
            made["operators"][hook] = {**known, "dtypes": dtypes}
    return {**made, "kernels": taken(found), "sources": sources}


def _of_the_library(function: Any) -> bool:
    return function is not None and inspect.unwrap(function).__module__.startswith("qiao_triton.")


def target_of(plugin: str, chip: str, triton: str) -> Target:
    """The plugin as the kit sees one, on a chip that is not here."""
    name = f"qiao_{plugin}"
    if plugin == "triton":
        from qiao_triton.architectures import ARCHITECTURES
        from qiao_triton.builds import dtypes_of
        from qiao_triton.limits import limits

        hooks = {hook: getattr(_library(hook), hook, None) for hook in json.loads(LIBRARY.read_text("utf-8"))["hooks"]}
        facts, distribution = limits(ARCHITECTURES[chip], dtypes_of(ARCHITECTURES[chip])), "qiao-triton-interpreted"
    else:
        hooks = dict(load_object(import_module(name), plugin).hooks)
        facts, distribution = hooks["capabilities"](chip), name.replace("_", "-")
    facts = replace(facts, sdk={"triton": triton})
    return Target(plugin, hooks, DeviceInfo(f"{plugin}:0", "cpu", chip, 0, ""), facts, distribution, "0.1.0")


def _library(hook: str) -> Any:
    names = ("attention", "cache", "fused", "gpu", "matmul", "sampling")
    modules = [import_module(f"qiao_triton.{name}") for name in names]
    return next((module for module in modules if hook in vars(module)), None)


def write(file: Path, target: Target, made: Mapping[str, Any]) -> bool:
    """Put the entry into ``file``, unless the chip itself has been tested there; whether it was put in."""
    known = json.loads(file.read_text("utf-8")) if file.exists() else {"chips": {}}
    there = known["chips"].get(target.device.chip)
    if there and there["level"] == "device" and not coverage.stale(known, target.hooks):
        return False
    coverage.write(file, target, made)
    return True


def main() -> int:
    """0 where every kernel compiles within the bounds, or where Triton cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=max(1, len(os.sched_getaffinity(0))))
    parser.add_argument("--from", dest="files", nargs="*", type=Path, help="what compiled --json printed before")
    options = parser.parse_args()
    from qiao_triton.builds import sources

    try:
        if options.files:
            found = [one for file in options.files for one in json.loads(file.read_text("utf-8"))]
        else:
            found = compiled([chip for _, names in FILES.values() for chip in names], options.processes)
    except RuntimeError as error:
        print(f"left out: {error}")
        return 0
    interpreter = json.loads(LIBRARY.read_text("utf-8"))["chips"]["interpreter"]
    for plugin, (file, names) in FILES.items():
        for chip in names:
            target = target_of(plugin, chip, interpreter["sdk"].get("triton", ""))
            ours = [one for one in found if one["architecture"] == chip]
            date = datetime.date.today().isoformat()
            if ours and not write(file, target, entry(target, ours, interpreter["operators"], sources(), date)):
                print(f"{chip} of {plugin} stays as it was tested on the device")
        print(f"wrote {file.relative_to(ROOT)}")
    bad = [one for one in found if one["faults"]]
    for one in bad:
        print(f"{one['architecture']} {one['hook']} {one['dtype']} {one['label']}: {'; '.join(one['faults'])}")
    print(f"{len(found)} kernels compiled, {len(bad)} beyond bounds")
    return 1 if bad or not found else 0


if __name__ == "__main__":
    sys.exit(main())
