"""Coverage files say what the kit of this tree would find: made by it, about this catalog, for the hooks there are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from qiao.contract import CATALOG
from qiao.registry import discover
from qiao.registry.manager import load
from qiao_conformance.coverage import LEVELS, stale

from tests.support.source import ROOT, relative
from tools.conformance import targets
from tools.coverage_page import LEVELS as MEANINGS
from tools.coverage_page import page

FILES = sorted({*ROOT.glob("plugins/*/src/**/coverage.json"), *ROOT.glob("plugins-*/src/*/coverage.json")})


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_coverage_is_fresh(file: Path) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    assert not stale(document), "run: make conformance"
    for chip in document["chips"].values():
        assert chip["level"] in LEVELS
        assert not {name for name, entry in chip["operators"].items() if entry["failed"]}


@pytest.mark.parametrize("target", targets(), ids=lambda t: t.title)
def test_every_target_has_a_file_about_the_hooks_that_it_has(target) -> None:
    document = json.loads(target.file.read_text(encoding="utf-8"))
    assert document["plugin"] == target.plugin and document["chips"]
    if target.python or target.missing:  # another environment has it
        pytest.skip(f"{target.plugin}: {target.missing or target.python}")
    discovery = discover()
    record = discovery.named(target.plugin)
    assert record is not None
    hooks = load(record, discovery.core_version).hooks
    assert not stale(document, hooks, hooks["capabilities"]), "run: make conformance"


def test_a_file_about_other_limits_than_are_declared_now_is_stale() -> None:
    """A dtype or a scheme that came later was not tried."""
    import qiao_reference

    document = json.loads((ROOT / "plugins/reference/src/qiao_reference/coverage.json").read_text(encoding="utf-8"))
    now = qiao_reference.capabilities("")

    def declares(**changes: object) -> list[str]:
        return stale(document, None, lambda chip: replace(now, **changes))

    assert not declares()
    assert declares(schemes=(*now.schemes, "w2a16")) == [
        "the plugin declares other limits of cpu than were tried: schemes"
    ]
    assert "dtypes" in declares(dtypes=("float32",))[0]


def test_the_page_has_level_date_limits_and_failures_of_each_chip() -> None:
    def chip(level: str, **operators: dict[str, object]) -> dict[str, object]:
        limits = {"dtypes": ["float16"], "block_sizes": [], "soft_cap": False}
        return {"level": level, "date": "2026-01-31", "sdk": {"torch": "2"}, "limits": limits, "operators": operators}

    right = {"level": "stand-in", "dtypes": ["float16"], "checks": 7, "failed": 0}
    wrong = {"level": "none", "dtypes": [], "checks": 9, "failed": 2}
    chips = {
        "X1": chip("stand-in", matmul=right, sample=wrong),
        "X2": chip("device", matmul={**right, "level": "device"}),
    }
    about = {"plugin": "acme", "distribution": "qiao-acme", "version": "3", "contract": "1.1", "chips": chips}
    lines = page("", [about, {**about, "plugin": "other", "chips": {}}]).splitlines()
    assert "| `matmul` | device |" in lines and "| `sample` | - |" in lines
    assert "| acme | X1 | stand-in | 2026-01-31 | 1 of " + f"{len(CATALOG)} | 16 | 2 |" in lines
    assert "| `matmul` | stand-in: float16 (7) | device: float16 (7) |" in lines
    assert "| `sample` | none: 2 of 9 checks failed | - |" in lines
    assert "| dtypes | float16 | float16 |" in lines and "| block sizes | any | any |" in lines
    assert "| soft cap | no | no |" in lines
    assert "No operator of `other` has been verified." in lines


def test_the_page_knows_the_levels_of_the_kit() -> None:
    assert tuple(MEANINGS) == LEVELS
