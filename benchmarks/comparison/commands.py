"""The command line: setup, run, report."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from . import environments, models
from .machine import describe, peaks, versions
from .measure import SHORT, Results, run_all
from .pins import REPOSITORY, Place
from .servers import PEERS, PRODUCTS, Setting
from .workload import CELLS, quick

SIZES = ("135m", "1b")


def chosen(text: str, known: tuple[str, ...], what: str) -> list[str]:
    """The names in ``text`` with commas between, in the order of ``known``; all of them for ``all``.

    Raises ``SystemExit`` for an unknown one.
    """
    names = known if text == "all" else tuple(text.split(","))
    wrong = [name for name in names if name not in known]
    if wrong:
        raise SystemExit(f"unknown {what}: {', '.join(wrong)}; there are {', '.join(known)}")
    return [name for name in known if name in names]


def parser() -> argparse.ArgumentParser:
    """All flags."""
    made = argparse.ArgumentParser(
        prog="benchmarks/peers.py", description="Qiao and other CPU servers under the same load, side by side."
    )
    commands = made.add_subparsers(dest="command", required=True)
    setup = commands.add_parser("setup", help="make the environments and models (once; about 16 GB and an hour)")
    run = commands.add_parser("run", help="measure; needs an otherwise idle machine")
    for command in (setup, run):
        command.add_argument("--cache", help="folder for environments and models; ~/.cache/qiao-bench if not given")
        command.add_argument("--peers", default="all", help=f"with commas between, of {', '.join(PRODUCTS)}")
        command.add_argument("--sizes", default="all", help="of 135m (SmolLM2) and 1b (random weights)")
        command.add_argument(
            "--qiao-python", type=Path, help="interpreter that has Qiao; the repository's .venv if not given"
        )
    run.add_argument("--cells", default="all", help=f"of {', '.join(cell.name for cell in CELLS)}")
    run.add_argument("--formats", default="all", help="of 4bit and 16bit")
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--minutes", type=float, default=120, help="start no later round that would not end by then")
    run.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every server")
    run.add_argument(
        "--qiao-dtype", default="auto", help="activations beside Qiao's 4-bit weights; auto is what users get"
    )
    run.add_argument("--qiao-flags", default="", help="more flags for qiao serve")
    run.add_argument(
        "--short", action="store_true", help="the figures of the targets only, in less than an hour: see README.md"
    )
    run.add_argument("--quick", action="store_true", help="two short requests a cell: does all of it start?")
    run.add_argument("--json", type=Path, default=Path("results/peers.json"))
    report = commands.add_parser("report", help="table and plots from the JSON file")
    report.add_argument("--json", type=Path, default=Path("results/peers.json"))
    report.add_argument("--readme", action="store_true", help="fill the figures of README.md and README.zh-CN.md too")
    return made


def main(arguments: list[str] | None = None) -> None:
    """Do what the command line says."""
    asked = parser().parse_args(arguments)
    if asked.command == "report":
        report(asked)
    elif asked.command == "setup":
        setup(asked)
    else:
        run(asked)


def setup(asked: argparse.Namespace) -> None:
    """Make whatever is missing."""
    wanted = set(chosen(asked.peers, PRODUCTS, "peer"))
    place = Place.of(asked.cache)
    environments.set_up(place, wanted, asked.qiao_python)
    models.set_up(place, chosen(asked.sizes, SIZES, "size"), wanted)
    print(f"everything is in {place.root}")


def run(asked: argparse.Namespace) -> None:
    """Measure and report."""
    place = Place.of(asked.cache)
    products = chosen(asked.peers, PRODUCTS, "peer")
    forms = chosen(asked.formats, ("4bit", "16bit"), "format")
    names = chosen(asked.cells, tuple(cell.name for cell in CELLS), "cell")
    sizes = chosen(asked.sizes, SIZES, "size")
    cells = [quick(cell) if asked.quick else cell for cell in CELLS if cell.name in names]
    setting = Setting(
        place=place,
        size=sizes[0],
        threads=asked.threads,
        qiao=(asked.qiao_python or REPOSITORY / ".venv" / "bin" / "python").absolute(),
        qiao_dtype=asked.qiao_dtype,
        qiao_flags=tuple(shlex.split(asked.qiao_flags)),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # an exception, so that the servers are ended too
    rounds = 1 if asked.quick else asked.rounds
    results = Results(asked.json, _head(setting, rounds, asked), short=asked.short)
    peers = [peer for peer in PEERS if peer.product in products and peer.format in forms]
    try:
        run_all(results, setting, peers, sizes, cells, rounds, asked.minutes)
    finally:
        results.write()
        report(argparse.Namespace(json=asked.json, readme=False))


def _head(setting: Setting, rounds: int, asked: argparse.Namespace) -> dict[str, Any]:
    words = ["python benchmarks/peers.py run"]
    for flag in ("peers", "sizes", "cells", "formats"):
        if getattr(asked, flag) != "all":
            words.append(f"--{flag} {getattr(asked, flag)}")
    words += (
        [f"--rounds {rounds}", f"--minutes {asked.minutes:g}"] + ["--quick"] * asked.quick + ["--short"] * asked.short
    )
    print("measuring what the machine can do", flush=True)
    return {
        "schema": 1,
        "started": time.time(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(words),
        "quick": asked.quick,
        "short": SHORT if asked.short else "",
        "rounds": rounds,
        "threads": setting.threads,
        "qiao_dtype": setting.qiao_dtype,
        "qiao_flags": list(setting.qiao_flags),
        "machine": describe(),
        "peaks": peaks(setting.place, setting.threads),
        "versions": versions(setting.place, setting.qiao),
    }


def report(asked: argparse.Namespace) -> None:
    """Write the table and the plots beside the JSON file, and the READMEs where asked."""
    from .plots import draw
    from .report import fill_readmes, markdown

    try:
        data = json.loads(asked.json.read_text())
    except FileNotFoundError:
        raise SystemExit(f"{asked.json} does not exist; make it with: python benchmarks/peers.py run") from None
    text = markdown(data)
    pictures = draw(data, asked.json.parent, asked.json.stem)
    links = "\n".join(f"![{path.stem}]({path.name})" for path in pictures)
    target = asked.json.with_suffix(".md")
    target.write_text(f"{text}\n{links}\n" if links else text)
    print(text)
    print(f"wrote {target}" + "".join(f", {path}" for path in pictures), file=sys.stderr)
    if asked.readme:
        link = os.path.relpath(target.resolve(), REPOSITORY)
        if link.startswith(".."):
            raise SystemExit(f"{target} is outside the repository, so that the READMEs cannot link to it")
        fill_readmes(data, REPOSITORY, link)
        print("filled README.md and README.zh-CN.md", file=sys.stderr)
