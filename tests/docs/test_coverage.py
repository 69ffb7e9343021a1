"""Coverage files say what the kit of this tree would find: made by it, about this catalog, for the hooks there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from qiao.registry import discover
from qiao.registry.manager import load
from qiao_conformance.coverage import LEVELS, stale

from tests.support.source import ROOT, relative
from tools.conformance import targets

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
    assert not stale(document, load(record, discovery.core_version).hooks), "run: make conformance"
