"""Markdown out of the JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .roofline import limit, shares
from .targets import SIZES, Verdict, figure, is_qiao, judge, peers_of, select
from .workload import CELLS

LIMIT = (
    "The machine's limit is the ratio of a program whose weights and caches pass at the bandwidth measured before the "
    "run and whose products run at the measured peak (int8 beside 4 bits, else fp32), with nothing else to do and no "
    "client on the same processors. An estimate: where the ratio is above it, memory gave more later than it did then."
)
FORMATS = {"4bit": "4 bit", "16bit": "16 bit"}
MARK = "<!-- figures -->"
END_MARK = "<!-- end of figures -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, all columns but the first to the right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def number(value: float | None) -> str:
    """Three digits that count, or a dash."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def against_peers(data: dict[str, Any]) -> str:
    """Each target: Qiao, the best peer, the ratio, the goal, met or missed."""
    rows = []
    for verdict in judge(data):
        if verdict.own is None and verdict.best is None:
            continue
        rows.append(_verdict_row(verdict, data.get("peaks") or {}))
    head = ("", "model", "format", "Qiao", "best peer", "", "ratio", "goal", "", "machine's limit")
    return f"{table(head, rows)}\n\n{LIMIT}" if rows else "nothing was measured"


def _verdict_row(verdict: Verdict, peaks: dict[str, Any]) -> list[str]:
    target, sign = verdict.target, "≤" if verdict.target.lower else "≥"
    goal = f"{sign} {target.ratio(verdict.format):g}×"
    ratio = "–" if verdict.ratio is None else f"{verdict.ratio:.2f}×"
    said = {True: "met", False: "**missed**", None: "not measured"}[verdict.met]
    names = [target.title, SIZES[target.size], FORMATS[verdict.format]]
    most = limit(peaks, target.cell, target.size, verdict.format)
    limited = "" if most is None or not verdict.best else f"{most / verdict.best:.2f}×"
    return [*names, number(verdict.own), number(verdict.best), verdict.best_peer or "–", ratio, goal, said, limited]


def against_machine(data: dict[str, Any]) -> str:
    """Shares of the measured peaks."""
    peaks = data.get("peaks") or {}
    said = (
        f"Measured peaks: {number(peaks.get('memory_gb_s'))} GB/s from memory, "
        f"{number(peaks.get('fp32_gop_s'))} Gop/s fp32, {number(peaks.get('int8_gop_s'))} Gop/s int8 "
        f"({peaks.get('int8_instructions', 'none')})."
    )
    rows = []
    for item in shares(data):
        goal = "–" if item.goal is None else f"≥ {item.goal:.0%}"
        met = "" if item.goal is None else "met" if item.share >= item.goal else "**missed**"
        names = [
            "decode, 1 stream" if item.cell == "single" else "prefill 1,024",
            SIZES[item.size],
            FORMATS[item.format],
        ]
        rows.append([*names, f"{number(item.value)} {item.unit}", f"{item.share:.0%}", goal, met])
    return said + "\n\n" + table(("", "model", "format", "reached", "of the peak", "goal", ""), rows) if rows else said


def against_transformers(data: dict[str, Any]) -> str:
    """Concurrency at no more memory, throughput and first token beside transformers' own server."""
    theirs = next((name for name in peers_of(data, "16bit") if name.startswith("transformers")), None)
    own = next(filter(is_qiao, peers_of(data, "16bit")), None)
    if theirs is None or own is None:
        return ""
    eight, same = (select(data, size="135m", peer=name, cell="streams8") for name in (theirs, own))
    many = select(data, size="135m", peer=own, cell="streams24")
    figures = [
        ("streams", 8.0 if eight else None, 24.0 if many else None, 3.0, False),
        ("peak memory at those streams, MiB", figure(eight, "pss_mib"), figure(many, "pss_mib"), 1.0, True),
        ("tokens/s at those streams", figure(eight, "full_rate"), figure(many, "full_rate"), 3.0, False),
        ("tokens/s, 8 streams each", figure(eight, "full_rate"), figure(same, "full_rate"), 3.0, False),
        (
            "mean time to first token, 8 streams each, ms",
            figure(eight, "ttft_mean"),
            figure(same, "ttft_mean"),
            0.5,
            True,
        ),
    ]
    rows = []
    for title, other, mine, goal, lower in figures:
        ratio = mine / other if mine is not None and other else None
        met = "–" if ratio is None else "met" if (ratio <= goal if lower else ratio >= goal) else "**missed**"
        shown = "–" if ratio is None else f"{ratio:.2f}×"
        rows.append([title, number(mine), number(other), shown, f"{'≤' if lower else '≥'} {goal:g}×", met])
    return table(("", "Qiao", theirs, "ratio", "goal", ""), rows)


def every_server(data: dict[str, Any], form: str) -> str:
    """All figures of a format, one row a server and model."""
    rows = []
    for size in SIZES:
        for peer in peers_of(data, form):
            runs = select(data, size=size, peer=peer)
            if runs:
                rows.append([f"{peer}, {SIZES[size]}", *_figures(data, size, peer)])
    cells = [cell.title for cell in CELLS[:4]]
    rates = [f"first token at {cell.rate}/s, mean / p95 ms" for cell in CELLS[4:]]
    return table(("", *cells, *rates, "TPOT ms, 1 stream", "memory MiB", "start s"), rows)


def _figures(data: dict[str, Any], size: str, peer: str) -> list[str]:
    def of(cell: str) -> list[dict[str, Any]]:
        return select(data, size=size, peer=peer, cell=cell)

    found = [number(figure(of("single"), "decode_rate")), number(figure(of("prefill"), "prefill_rate"))]
    found += [number(figure(of(cell), "full_rate")) for cell in ("streams8", "streams24")]
    for cell in CELLS[4:]:
        runs = of(cell.name)
        found.append(f"{number(figure(runs, 'ttft_mean'))} / {number(figure(runs, 'ttft_p95'))}" if runs else "–")
    start = next((s["seconds"] for s in data["starts"] if s["size"] == size and s["peer"] == peer), None)
    memory = figure(select(data, size=size, peer=peer), "pss_mib")
    return [*found, number(figure(of("single"), "tpot_ms")), number(memory), number(start)]


def skipped(data: dict[str, Any]) -> str:
    """What was not measured, and why, in the words of what refused."""
    return "\n".join("- " + ", ".join(str(value) for value in item.values()) for item in data["skipped"])


def markdown(data: dict[str, Any]) -> str:
    """The whole report."""
    machine, versions = data["machine"], data["versions"]
    parts = [
        "# Qiao beside other CPU servers",
        f"{data['date']}, {data['minutes']} minutes; {_machine(machine)}. "
        f"Rounds: {data['rounds']}, interleaved; medians. "
        f"How it is measured: benchmarks/README.md. Command: `{data['command']}`",
        *([f"A short run. {data['short']}"] if data.get("short") else []),
        "## Against the best peer\n\n" + against_peers(data),
        "## Against the machine\n\n" + against_machine(data),
    ]
    transformers = against_transformers(data)
    if transformers:
        parts.append("## Against transformers, SmolLM2-135M, 16 bit\n\n" + transformers)
    parts += [_section(data, form) for form in FORMATS if peers_of(data, form)]
    if data["skipped"]:
        parts.append("## Not measured\n\n" + skipped(data))
    parts.append("## Versions\n\n" + "\n".join(f"- {name}: {text}" for name, text in versions.items()))
    return "\n\n".join(parts) + "\n"


def _section(data: dict[str, Any], form: str) -> str:
    return f"## Every server, {FORMATS[form]}\n\n{every_server(data, form)}"


def _machine(machine: dict[str, Any]) -> str:
    flags = ", ".join(flag.upper() for flag in machine["flags"])
    return f"{machine['processor']} ({flags}), {machine['cores']} cores, {machine['memory_gib']} GiB"


@dataclass(frozen=True, slots=True)
class Words:
    """The README's words in one language."""

    intro: str
    everything: str
    made: str
    head: tuple[str, ...]
    cells: tuple[str, ...]


def _rounds(data: dict[str, Any]) -> str:
    """How many rounds there are of Qiao's cells: a number, or the least and the most."""
    counts: dict[tuple[str, str, str], int] = {}
    for run in data["runs"]:
        if is_qiao(run["peer"]):
            key = (run["size"], run["format"], run["cell"])
            counts[key] = counts.get(key, 0) + 1
    least, most = min(counts.values(), default=0), max(counts.values(), default=0)
    return str(least) if least == most else f"{least} to {most}"


WORDS = {
    "en": Words(
        "Tokens a second over HTTP beside the best peer of each cell, on {machine}, {date}",
        "all figures",
        "Made with `{command}`; rounds that there was time for: {rounds}.",
        ("", "model", "Qiao, 4 bit", "best peer", "Qiao, 16 bit", "best peer"),
        ("one stream", "prefill of 1,024", "8 streams", "24 streams", "peak memory, MiB"),
    ),
    "zh": Words(
        "经 HTTP 测得的每秒 token 数，与每项最快的同类服务对比；{machine}，{date}",
        "全部数据",
        "测量命令：`{command}`；实际完成的轮数：{rounds}。",
        ("", "模型", "Qiao，4 位", "最佳同类", "Qiao，16 位", "最佳同类"),
        ("单路解码", "1,024 token 预填充", "8 路并发", "24 路并发", "内存峰值，MiB"),
    ),
}


def readme_figures(data: dict[str, Any], language: str, link: str) -> str:
    """The short table of the README, in ``en`` or ``zh``; ``link`` leads to the whole report."""
    words = WORDS[language]
    verdicts = {(v.target.cell, v.target.size, v.format): v for v in judge(data)}
    order = ("single", "prefill", "streams8", "streams24", "")
    rows = []
    for cell, title in zip(order, words.cells, strict=True):
        for size, name in SIZES.items():
            pair = [verdicts.get((cell, size, form)) for form in FORMATS]
            if any(v is not None and v.own is not None for v in pair):
                rows.append([title, name, *(text for v in pair for text in _short(v))])
    intro = words.intro.format(machine=_machine(data["machine"]), date=data["date"])
    made = words.made.format(command=data["command"], rounds=_rounds(data))
    return f"{intro} ([{words.everything}]({link})):\n\n{table(words.head, rows)}\n\n{made}"


def _short(verdict: Verdict | None) -> tuple[str, str]:
    if verdict is None or verdict.own is None:
        return "–", "–"
    best = "–" if verdict.best is None else f"{number(verdict.best)} ({verdict.best_peer})"
    return f"**{number(verdict.own)}**", best


def fill(text: str, figures: str) -> str:
    """``text`` with ``figures`` between the marks. Raises ``ValueError`` where the first mark is missing."""
    before, mark, after = text.partition(MARK)
    if not mark:
        raise ValueError(f"no {MARK} to fill")
    after = after.partition(END_MARK)[2] if END_MARK in after else after
    return f"{before}{MARK}\n{figures}\n{END_MARK}{after}"


def fill_readmes(data: dict[str, Any], repository: Path, link: str) -> None:
    """Put the figures into both READMEs of the repository."""
    for name, language in (("README.md", "en"), ("README.zh-CN.md", "zh")):
        file = repository / name
        file.write_text(fill(file.read_text(), readme_figures(data, language, link)))
