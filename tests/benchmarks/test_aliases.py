"""The judgement of ``benchmarks/aliases.py``: it passes what is right and fails each thing that is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from qiao.observability.audit import AuditLog

from benchmarks.aliases import CHANGES, KINDS, configuration, plot, problems, split, verdicts


def measured() -> dict[str, Any]:
    answered = ["a"] * 15 + ["b"] * 5
    one = {"split": split(answered, {"a": 3.0, "b": 1.0}), "counters": {"a": 15, "b": 5}, "answered": answered}
    kinds = {
        kind: {name: dict(value) if isinstance(value, dict) else value for name, value in one.items()} for kind in KINDS
    }
    audit = {name: {"lines": 60, "problems": ["line 2"] if "line" in name else []} for name in CHANGES}
    return {"kinds": kinds, "audit": audit}


def off(data: dict[str, Any]) -> None:
    data["kinds"]["user"]["split"]["a"] = {"requests": 15, "share": 0.771, "asked": 0.75}


def counter(data: dict[str, Any]) -> None:
    data["kinds"]["nobody"]["counters"]["b"] = 4


def unseen(data: dict[str, Any]) -> None:
    data["audit"]["two lines swapped"]["problems"] = []


def alarm(data: dict[str, Any]) -> None:
    data["audit"]["as it was written"]["problems"] = ["line 3"]


def lost(data: dict[str, Any]) -> None:
    data["audit"]["as it was written"]["lines"] = 59


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (off, "user: a has 77.10%"),
        (counter, "nobody: b answered 5"),
        (unseen, "swapped"),
        (alarm, "line 3"),
        (lost, "59"),
    ],
)
def test_each_fault_is_told(wrong: Callable[[dict[str, Any]], None], said: str) -> None:
    data = measured()
    assert problems(data, 20, 0.02) == []
    wrong(data)
    (problem,) = problems(data, 20, 0.02)
    assert said in problem


def test_the_changes_change_what_they_say(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    for i in range(40):
        log.write({"model": "ab"[i % 2]})
    log.close()
    said = verdicts(tmp_path / "audit.jsonl")
    assert [len(one["problems"]) > 0 for one in said.values()] == [False, True, True, True]
    assert [one["lines"] for one in said.values()] == [40, 40, 39, 40]
    lines = (tmp_path / "audit.jsonl").read_text().splitlines(keepends=True)
    same = {
        name: sum(a == b for a, b in zip(change(lines, random.Random(2)), lines, strict=False))
        for name, change in CHANGES.items()
    }
    assert (same["a line edited"], same["two lines swapped"]) == (39, 38)


def test_the_configuration_has_what_was_asked_for() -> None:
    written = configuration({"a": "M", "b": "N"}, {"a": 9.0, "b": 1.0})
    assert [(one["name"], one["model"], one["memory"]) for one in written["models"]] == [
        ("a", "M", 0.2),
        ("b", "N", 0.2),
    ]
    assert written["aliases"] == {"trial": {"weights": {"a": 9.0, "b": 1.0}}}


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(measured(), 0.02, tmp_path / "split.png")
    assert (tmp_path / "split.png").stat().st_size > 1000
