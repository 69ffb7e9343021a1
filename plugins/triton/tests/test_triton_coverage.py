"""What compiling for chips that are not here found stands in coverage files, which say by a digest of which sources."""

from __future__ import annotations

import json
from pathlib import Path

from qiao_triton.architectures import ARCHITECTURES, COMPILED
from qiao_triton.builds import sources

ROOT = Path(__file__).resolve().parents[3]
FILES = ("plugins/triton/src/qiao_triton", "plugins-cuda/src/qiao_cuda", "plugins-dcu/src/qiao_dcu")


def test_coverage_is_about_these_kernels() -> None:
    known = {}
    for folder in FILES:
        document = json.loads((ROOT / folder / "coverage.json").read_text("utf-8"))
        known |= {name: chip for name, chip in document["chips"].items() if chip["level"] == "compiled"}
    assert set(known) == set(COMPILED)
    for name, chip in known.items():
        assert chip["sources"] == sources(), "run: make conformance"
        assert all(most <= bound for most, bound in (chip["kernels"][k] for k in ("shared", "registers", "spilled")))
        assert chip["kernels"]["shared"][1] == ARCHITECTURES[name].shared
        levels = {hook: entry["level"] for hook, entry in chip["operators"].items()}
        assert set(levels.values()) <= {"compiled", "interpreted", "stand-in"}
        assert {"attention", "decode_attention", "matmul", "expert_matmul", "sample"} <= {
            hook for hook, level in levels.items() if level == "compiled"
        }
