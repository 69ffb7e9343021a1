"""Whether a Grafana board's metrics exist on a server: every name in its PromQL is looked up on ``/metrics``.

    python -m tools.check_board deploy/grafana/qiao.json --url http://127.0.0.1:8000 [--json] [--key KEY]

Exit status 1 where one is missing, 2 where the board or the page cannot be read. A family that is there without a
series of its own counts as there: its panel is empty until something happens.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

AGGREGATIONS = frozenset(
    {
        *("sum", "min", "max", "avg", "group", "stddev", "stdvar", "count", "count_values", "bottomk", "topk"),
        *("quantile", "limitk", "limit_ratio"),
    }
)
LISTS = frozenset(["by", "without", "on", "ignoring", "group_left", "group_right"])
"""Words behind which labels stand in parentheses."""
WORDS = frozenset(["and", "or", "unless", "atan2", "bool", "offset", "inf", "nan", "start", "end"])
PROMETHEUS_OWN = frozenset({"up", "ALERTS", "ALERTS_FOR_STATE"})
SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("", "_sum", "_count"),
}

_TOKEN = re.compile(
    r"""
    (?P<skip>\#[^\n]*|\s+|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`|\$\w+|\$\{[^}]*\}|\[\[\w+\]\]|\[[^\]]*\])
    |(?P<number>(?:\d[\w.]*|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<name>[A-Za-z_:][\w:]*(?:\$\{?\w+\}?[\w:]*)*)
    |(?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_NAME_LABEL = re.compile(r"""__name__\s*=\s*["']([A-Za-z_:][\w:]*)["']""")
_LABEL_VALUES = re.compile(r"\s*label_values\(\s*(?:(.*),)?\s*\w+\s*\)\s*", re.DOTALL)
_QUERY_RESULT = re.compile(r"\s*query_result\((.*)\)\s*", re.DOTALL)


def metric_names(expression: str) -> set[str]:
    """The metrics that a PromQL expression reads: no functions, labels, strings, durations or Grafana variables."""
    tokens = [m for m in _TOKEN.finditer(expression) if not m["skip"]]
    found: set[str] = set()
    at = 0
    while at < len(tokens):
        token = tokens[at]
        following = tokens[at + 1].group() if at + 1 < len(tokens) else ""
        word = (token["name"] or "").lower()
        if token.group() == "{":
            end = _closing(expression, token.end())
            found.update(_NAME_LABEL.findall(expression[token.end() : end]))
            while at < len(tokens) and tokens[at].start() < end:
                at += 1
        elif word in LISTS and following == "(":
            while tokens[at].group() != ")" and at + 1 < len(tokens):
                at += 1
        elif token["name"] and not (word in AGGREGATIONS or word in LISTS or word in WORDS or following == "("):
            found.add(token["name"])
        at += 1
    return {name for name in found if "$" not in name}


def _closing(expression: str, at: int) -> int:
    """Where the braces end that were opened before ``at``; a brace in a string is none."""
    quoted = re.compile(r"""\}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`""", re.DOTALL)
    for match in quoted.finditer(expression, at):
        if match.group() == "}":
            return match.start()
    return len(expression)


def board_names(board: dict[str, Any]) -> dict[str, list[str]]:
    """Each metric of a board with the places that read it."""
    found: dict[str, list[str]] = {}
    for place, expression in _expressions(board):
        for name in sorted(metric_names(expression) - PROMETHEUS_OWN):
            places = found.setdefault(name, [])
            if place not in places:
                places.append(place)
    return dict(sorted(found.items()))


def _expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    board = board.get("dashboard", board)  # as Grafana's own interface exports it
    for panel in _panels(board.get("panels", []) + [p for row in board.get("rows", []) for p in row["panels"]]):
        for target in panel.get("targets", []):
            if isinstance(target.get("expr"), str):
                yield f"panel {panel.get('title', panel.get('id'))!r}", target["expr"]
    for note in board.get("annotations", {}).get("list", []):
        if isinstance(note.get("expr"), str):
            yield f"annotation {note.get('name')!r}", note["expr"]
    for variable in board.get("templating", {}).get("list", []):
        query = variable.get("query") if variable.get("type") == "query" else None
        text = query.get("query", "") if isinstance(query, dict) else query or ""
        matched = _LABEL_VALUES.fullmatch(text) or _QUERY_RESULT.fullmatch(text)
        if matched and matched[1]:
            yield f"variable {variable.get('name')!r}", matched[1]


def _panels(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from _panels(panel.get("panels", []))


def served_names(page: str) -> set[str]:
    """Every name that can be asked for on a page in Prometheus's text format."""
    found: set[str] = set()
    for family in text_string_to_metric_families(page):
        found.update(sample.name for sample in family.samples)
        found.update(family.name + suffix for suffix in SUFFIXES.get(family.type, ("",)))
    return found


def check(boards: list[Path], page: str) -> dict[str, Any]:
    """For each board its names, and those that ``page`` lacks with the places that read them."""
    served, told = served_names(page), {}
    for path in boards:
        names = board_names(json.loads(path.read_text()))
        told[str(path)] = {
            "metrics": list(names),
            "missing": {name: places for name, places in names.items() if name not in served},
        }
    return told


def main(words: list[str] | None = None) -> int:
    """Check, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("boards", nargs="+", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--key", help="key of a server that asks for one")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    try:
        answer = httpx.get(args.url.rstrip("/") + "/metrics", headers=headers, timeout=30, trust_env=False)
        answer.raise_for_status()
        told = check(args.boards, answer.text)
    except (httpx.HTTPError, OSError, ValueError) as error:
        print(f"cannot be checked: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        for board, found in told.items():
            print(f"{board}: {len(found['metrics'])} metrics, {len(found['missing'])} missing")
            for name, places in found["missing"].items():
                print(f"  {name}: {', '.join(places)}")
    empty = [board for board, found in told.items() if not found["metrics"]]
    for board in empty:
        print(f"{board}: no PromQL in it", file=sys.stderr)
    return 1 if empty or any(found["missing"] for found in told.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
