"""Coverage files say what the kit of this tree would find: made by it, about this catalog, for the hooks there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from qiao_conformance.coverage import LEVELS, stale

from tests.support.source import ROOT, relative

FILES = sorted({*ROOT.glob("plugins/*/src/**/coverage.json"), *ROOT.glob("plugins-*/src/*/coverage.json")})


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_coverage_is_fresh(file: Path) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    assert not stale(document), "run: make conformance"
    for chip in document["chips"].values():
        assert chip["level"] in LEVELS
        assert not {name for name, entry in chip["operators"].items() if entry["failed"]}
