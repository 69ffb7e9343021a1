"""What compiled kernels say in coverage files: a level only where the kit passes too, the device's own word stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import kernels
from tools.coverage_page import page

INTERPRETED = {
    "matmul": {"level": "interpreted", "dtypes": ["float16"], "checks": 9, "failed": 0},
    "sample": {"level": "none", "dtypes": [], "checks": 9, "failed": 1},
    "copy_blocks": {"level": "interpreted", "dtypes": ["bfloat16", "float16"], "checks": 5, "failed": 0},
    "swap_blocks": {"level": "interpreted", "dtypes": ["float16"], "checks": 5, "failed": 0},
    "capture": {"level": "stand-in", "dtypes": ["float16"], "checks": 3, "failed": 0},
}


def kernel(hook: str, shared: int = 1024, **other: object) -> dict[str, object]:
    usual = {"architecture": "gfx906", "hook": hook, "dtype": "float16", "label": "a", "kernel": "k", "faults": []}
    return {**usual, "shared": shared, "registers": 40, "spilled": 0, "bounds": [65536, 256, 0], **other}


@pytest.fixture
def target():
    return kernels.target_of("dcu", "gfx906", "3.9.0")


def made(target, *found: dict[str, object]) -> dict[str, object]:
    return kernels.entry(target, found, INTERPRETED, "digest", "2026-01-31")


def test_levels(target) -> None:
    bad = kernel("rms_norm", faults=["registers 300 above 256"], registers=300)
    entry = made(target, kernel("matmul"), kernel("matmul", 70), kernel("sample"), bad)
    levels = {hook: one["level"] for hook, one in entry["operators"].items()}
    # the DCU has a swap_blocks of its own, so what the shared one does says nothing about it
    assert levels == {
        **{"matmul": "compiled", "sample": "none", "rms_norm": "none"},
        **{"copy_blocks": "interpreted", "capture": "stand-in"},
    }
    assert entry["operators"]["matmul"]["checks"] == 3 and entry["operators"]["rms_norm"]["failed"] == 2
    assert entry["operators"]["copy_blocks"]["dtypes"] == ["float16"], "gfx906 has no bfloat16"
    assert entry["level"] == "compiled" and entry["sdk"]["triton"] == "3.9.0" and entry["sources"] == "digest"
    assert entry["kernels"] == {"compiled": 4, "shared": [1024, 65536], "registers": [300, 256], "spilled": [0, 0]}


def test_a_chip_that_was_tested_itself_keeps_that(target, tmp_path: Path) -> None:
    file, entry = tmp_path / "coverage.json", made(target, kernel("matmul"))
    assert kernels.write(file, target, entry)
    document = json.loads(file.read_text())
    assert document["chips"]["gfx906"] == entry and document["plugin"] == "dcu"
    document["chips"]["gfx906"]["level"] = "device"
    file.write_text(json.dumps(document))
    assert not kernels.write(file, target, entry)
    file.write_text(json.dumps({**document, "kit": {"version": "0", "catalog": "an older one"}}))
    assert kernels.write(file, target, entry), "but not where it is about another catalog"


def test_the_page_has_what_they_take(target, tmp_path: Path) -> None:
    file = tmp_path / "coverage.json"
    kernels.write(file, target, made(target, kernel("matmul"), kernel("rms_norm", 4096)))
    lines = page("", [json.loads(file.read_text())]).splitlines()
    row = "| kernels | 2: at most 4,096 of 65,536 bytes shared, 40 of 256 registers, 0 of 0 spilled |"
    assert row in lines
    assert "| `matmul` | compiled: float16 (2) |" in lines and "| `capture` | stand-in: float16 (3) |" in lines
