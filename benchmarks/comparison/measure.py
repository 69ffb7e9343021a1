"""``run``: start the servers of a model and format, measure them in turn, and keep every round."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .load import run_load
from .processes import MemoryWatch, busy_seconds, cpu_seconds, peak_resident_mib
from .servers import Peer, Server, Setting
from .stats import median_of, summarise
from .workload import WARM_UP, Cell, requests_of

FAR_BEHIND = 0.6
"""A peer below this share of the best peer of a cell in the first round is not measured there again."""

BEHIND = 0.8
"""The same in a short run."""

ENOUGH = 0.8
"""A peer whose rate in the 24-stream cell is below this share of what a Poisson cell asks for is not measured there."""

HOPELESS = 0.5
"""A peer below this share of the best peer of a cell on the small model is not measured there on the large one; in a
short run also: one below it with 8 streams is not measured with 24."""

SHORT = (
    "Cells with several streams and Poisson cells end when each request has its first text (those of a server that "
    "does not drop what nobody reads run to their end); the 95th percentile of gaps between texts lacks the end. "
    f"Later rounds measure a peer in the cells where it reached {BEHIND:.0%} of the best peer in the first. "
    f"A peer below {HOPELESS:.0%} of the best one with 8 streams is not measured with 24."
)
"""What a short run leaves out."""

SETTLE_SECONDS = 0.3
CANCEL_SECONDS = 1.0
"""What a server gets to notice that clients have gone, before it is paused."""


@dataclass
class Results:
    """All that is known, written to ``path`` after each measurement so that a broken run loses nothing."""

    path: Path
    head: dict[str, Any]
    short: bool = False
    starts: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def write(self) -> None:
        """Replace the file."""
        self.head["minutes"] = round((time.time() - self.head["started"]) / 60, 1)
        data = {**self.head, "starts": self.starts, "runs": self.runs, "skipped": self.skipped}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(self.path)

    def of(self, size: str, peer: str, cell: str) -> list[dict[str, Any]]:
        """The rounds measured so far."""
        return [run for run in self.runs if (run["size"], run["peer"], run["cell"]) == (size, peer, cell)]

    def skip(self, **what: str) -> None:
        """Note once what was not measured and why."""
        if what not in self.skipped:
            self.skipped.append(what)
            say("  " + ", ".join(what.values()))
            self.write()


def say(text: str) -> None:
    """A line of progress with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def figure_of(cell: str) -> str:
    """The figure by which servers are compared in a cell: higher is better."""
    rates = {"single": "decode_rate", "prefill": "prefill_rate", "streams8": "full_rate", "streams24": "full_rate"}
    return rates.get(cell, "output_rate")


def measure_group(
    results: Results, setting: Setting, peers: list[Peer], cells: list[Cell], rounds: int, deadline: float
) -> None:
    """Measure ``peers`` (of one format) on a model: all are started, then each runs alone while the others are stopped.

    Rounds take cells in order and servers in turn within a cell. After the first, a round starts only if it would end
    before ``deadline`` (``time.monotonic``) when each of its parts takes as long as the last time.
    """
    with ExitStack() as stack:
        servers = []
        for peer in peers:
            if all(_hopeless(results, setting.size, peer, peers, cell) for cell in cells):
                continue
            server = _start(results, setting, peer, stack)
            if server is not None:
                servers.append(server)
        for number in range(rounds):
            todo = [
                (cell, server)
                for cell in cells
                for server in servers
                if not (number and _far_behind(results, setting.size, server.peer, servers, cell))
                and not _hopeless(results, setting.size, server.peer, peers, cell)
            ]
            if number and time.monotonic() + _expected(results, setting.size, todo) > deadline:
                results.skip(size=setting.size, format=peers[0].format, why=f"rounds after {number}: no time left")
                break
            for cell, server in todo:
                _measure(results, setting.size, server, servers, cell, number)


def _expected(results: Results, size: str, todo: Iterable[tuple[Cell, Server]]) -> float:
    """Seconds that a round takes if everything lasts as long as the last time."""
    last = [results.of(size, server.peer.name, cell.name)[-1:] for cell, server in todo]
    return sum(run["wall_s"] + SETTLE_SECONDS + CANCEL_SECONDS for runs in last for run in runs)


def _start(results: Results, setting: Setting, peer: Peer, stack: ExitStack) -> Server | None:
    """The server, warmed up and paused, or None where it cannot run here; then its last words are kept."""
    say(f"{setting.size}: starting {peer.name}")
    logs = setting.place.root / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{setting.size}-{peer.name.replace(' ', '-')}.log"
    try:
        server = Server(peer, setting, log)
    except (RuntimeError, OSError) as error:
        results.skip(size=setting.size, format=peer.format, peer=peer.name, why=f"cannot run here: {error}")
        return None
    stack.callback(server.stop)
    timings, _ = asyncio.run(run_load(server.port, requests_of(WARM_UP, setting.size, peer.name), 2, peer.body))
    errors = [timing.error for timing in timings if timing.error]
    if errors:
        server.stop()
        results.skip(size=setting.size, format=peer.format, peer=peer.name, why=f"cannot run here: {errors[0]}")
        return None
    results.starts.append(
        {"size": setting.size, "format": peer.format, "peer": peer.name, "seconds": round(server.start_s, 2)}
    )
    say(f"  first answer after {server.start_s:.1f} s")
    server.pause()
    results.write()
    return server


def _hopeless(results: Results, size: str, peer: Peer, peers: Iterable[Peer], cell: Cell) -> bool:
    """Whether a peer was so slow on the small model that the large one need not be tried; this is noted."""
    if size == "135m" or peer.product == "qiao":
        return False
    key = figure_of(cell.name)
    rates = {p.name: median_of(results.of("135m", p.name, cell.name), key) for p in peers if p.product != "qiao"}
    own, best = rates.get(peer.name), max((rate for rate in rates.values() if rate), default=0.0)
    if own is None or own >= HOPELESS * best:
        return False
    why = f"{own:.0f} tokens/s on the small model, where the best peer had {best:.0f}"
    results.skip(size=size, format=peer.format, peer=peer.name, cell=cell.name, why=why)
    return True


def _far_behind(results: Results, size: str, peer: Peer, servers: Iterable[Server], cell: Cell) -> bool:
    """Whether a peer's first round leaves no doubt that it is not the best one, which is noted. Qiao is never."""
    key, least = figure_of(cell.name), BEHIND if results.short else FAR_BEHIND
    others = [s.peer.name for s in servers if s.peer.product != "qiao"]
    first = {name: median_of(results.of(size, name, cell.name)[:1], key) for name in others}
    own, best = first.get(peer.name), max((rate for rate in first.values() if rate), default=0.0)
    # At a rate that each server keeps up with, all make the same number of tokens a second: compare what users wait.
    if cell.rate is not None:
        waits = {name: median_of(results.of(size, name, cell.name)[:1], "ttft_mean_ms") for name in others}
        mine, shortest = waits.get(peer.name), min((wait for wait in waits.values() if wait), default=0.0)
        behind = mine is not None and mine * least > shortest
        why = f"first token after {mine or 0:.0f} ms in the first round, {shortest:.0f} ms at the best peer"
    else:
        behind = own is not None and own < least * best
        why = f"{own or 0:.0f} tokens/s in the first round, {best:.0f} at the best peer"
    if behind:
        results.skip(size=size, format=peer.format, peer=peer.name, cell=cell.name, why=f"later rounds: {why}")
    return behind


def _overloaded(results: Results, size: str, server: Server, servers: Iterable[Server], cell: Cell) -> str | None:
    """Why a Poisson cell is more than the server can do, or None. The best peer is measured whatever it can do."""
    if cell.rate is None:
        return None
    rates = _rates(results, size, servers, "streams24", "streams8")
    own = rates.get(server.peer.name)
    best = max((rate for s in servers if s.peer.product != "qiao" and (rate := rates[s.peer.name])), default=0.0)
    asked = cell.rate * sum(cell.output) / 2
    if own is None or own >= asked * ENOUGH or own == best or server.peer.product == "qiao":
        return None
    return f"over its capacity: {own:.0f} tokens/s with 24 streams, {asked:.0f} asked for"


def _slow(results: Results, size: str, server: Server, servers: Iterable[Server], cell: Cell) -> str | None:
    """Why a short run need not see whether a server does better with 24 streams than with 8, or None."""
    if not results.short or cell.name != "streams24" or server.peer.product == "qiao":
        return None
    rates = _rates(results, size, servers, "streams8")
    others = [rates[s.peer.name] for s in servers if s.peer.product != "qiao"]
    own, best = rates[server.peer.name], max((rate for rate in others if rate), default=0.0)
    if own is None or own >= HOPELESS * best:
        return None
    return f"{own:.0f} tokens/s with 8 streams, where the best peer had {best:.0f}"


def _rates(results: Results, size: str, servers: Iterable[Server], *cells: str) -> dict[str, float | None]:
    """The rate of each server in the first of ``cells`` where it has one."""
    rates: dict[str, float | None] = {}
    for server in servers:
        found = (median_of(results.of(size, server.peer.name, cell), "full_rate") for cell in cells)
        rates[server.peer.name] = next((rate for rate in found if rate), None)
    return rates


def _measure(results: Results, size: str, server: Server, servers: list[Server], cell: Cell, number: int) -> None:
    """One cell on one server."""
    peer = server.peer
    if (peer.cells is not None and cell.name not in peer.cells) or size not in cell.sizes:
        return
    why = _overloaded(results, size, server, servers, cell) or _slow(results, size, server, servers, cell)
    if why:
        results.skip(size=size, format=peer.format, peer=peer.name, cell=cell.name, why=why)
        return
    requests = requests_of(cell, size, f"round {number}")
    cut = results.short and peer.cancels and cell.cuttable
    server.resume()
    time.sleep(SETTLE_SECONDS)
    before = busy_seconds() - cpu_seconds(server.pid) - sum(os.times()[:2])
    with MemoryWatch(server.pid) as memory:
        concurrency = None if cell.rate is not None else cell.concurrency
        timings, wall = asyncio.run(run_load(server.port, requests, concurrency, peer.body, cut))
    others = busy_seconds() - cpu_seconds(server.pid) - sum(os.times()[:2]) - before
    figures = summarise(timings, wall)
    pairs = zip(timings, requests, strict=True)
    wrong = sum(t.error is None and not t.cut and t.completion_tokens != r.output_tokens for t, r in pairs)
    figures |= {
        "size": size,
        "format": peer.format,
        "peer": peer.name,
        "cell": cell.name,
        "round": number,
        "other_length": wrong,
        "others_cpu": round(max(0.0, others) / wall / (os.cpu_count() or 1), 3),
        "pss_mib": round(memory.peak_mib, 1),
        "peak_rss_mib": round(peak_resident_mib(server.pid), 1),
        "requests": [timing.as_dict() for timing in timings],
    }
    if cut:
        time.sleep(CANCEL_SECONDS)
    server.pause()
    results.runs.append(figures)
    results.write()
    _say_run(figures)


def _say_run(run: dict[str, Any]) -> None:
    rate = run[figure_of(run["cell"])] or 0.0
    first = run["ttft_mean_ms"] or 0.0
    text = f"  {run['size']} {run['cell']:12} round {run['round']} {run['peer']:18} {rate:8.1f} tokens/s"
    text += (
        f", first token {first:7.0f} ms, {run['pss_mib']:6.0f} MiB, others {run['others_cpu']:.0%} of the processors"
    )
    if run["failed"] or run["other_length"]:
        text += f"; {run['failed']} failed, {run['other_length']} of another length {run['errors']}"
    say(text)


def run_all(
    results: Results,
    setting: Setting,
    peers: list[Peer],
    sizes: list[str],
    cells: list[Cell],
    rounds: int,
    minutes: float,
) -> None:
    """Measure every model and format, each within its share of what is left of ``minutes``."""
    groups = [
        (size, [peer for peer in peers if peer.format == name and size in peer.sizes])
        for size in sizes
        for name in dict.fromkeys(peer.format for peer in peers)
    ]
    groups = [(size, members) for size, members in groups if members]
    weights = {"135m": 3.0, "1b": 2.0}
    end = time.monotonic() + minutes * 60
    for place, (size, members) in enumerate(groups):
        now = time.monotonic()
        share = weights[size] / sum(weights[other] for other, _ in groups[place:])
        wanted = [cell for cell in cells if size in cell.sizes]
        measure_group(results, replace(setting, size=size), members, wanted, rounds, now + (end - now) * share)
    print(f"wrote {results.path}", file=sys.stderr)
