"""Kernels compile for chips that are not here, within bounds: a sample here, all of them in ``make conformance``."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

KERNELS = sorted((Path(__file__).resolve().parents[1] / "src" / "qiao_triton" / "kernels").glob("*.py"))

SAMPLE = """
import json, sys
from dataclasses import asdict
from qiao_triton.compiled import compile_all
print(json.dumps([asdict(x) for x in compile_all((sys.argv[1],), 1, sys.argv[2], int(sys.argv[3]))]))
"""


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90", "gfx906", "gfx942"])
def test_a_sample_compiles_within_the_bounds(run, architecture) -> None:
    found = json.loads(run(SAMPLE, architecture, "", "24", interpret=False))
    assert len(found) >= 4 and {x["architecture"] for x in found} == {architecture}
    assert not [x for x in found if x["faults"]]
    assert all(x["registers"] > 0 and (x["spilled"] == 0 or x["dtype"] == "float32") for x in found)
    shared = {"sm_75": 64, "sm_90": 227, "gfx906": 64, "gfx942": 64}[architecture] * 1024
    assert all(x["shared"] <= shared for x in found) and any(x["shared"] for x in found)


BEYOND = """
from dataclasses import replace
from qiao_triton.architectures import ARCHITECTURES
from qiao_triton.builds import builds
from qiao_triton.compiled import compile_one
arch = ARCHITECTURES["sm_86"]
build = next(b for b in builds(arch, "float16") if b.hook == "matmul" and "512" in b.label)
constants = {**build.launch.constants, "M": 128, "N": 128, "K": 128}
big = replace(build, launch=replace(build.launch, constants=constants, stages=4))
print(*compile_one(arch, big).faults, sep="; ")
constants = {**build.launch.constants, "K": 48}
print(repr(compile_one(arch, replace(build, launch=replace(build.launch, constants=constants))).faults))
"""


def test_a_tile_beyond_the_bounds_and_one_that_does_not_compile_are_faults(run) -> None:
    beyond, broken = run(BEYOND, interpret=False).strip().splitlines()
    assert re.search(r"(shared memory|spilled) \d+ above \d+", beyond)
    assert "Error" in broken


RECORDED = """
import torch
from qiao_triton.architectures import ARCHITECTURES
from qiao_triton.builds import builds, dtypes_of
hooks = set()
for name, arch in ARCHITECTURES.items():
    for dtype in dtypes_of(arch):
        for build in builds(arch, dtype):
            hooks.add(build.hook)
            assert build.launch.warps * arch.lanes <= 512, (name, build.label)
            assert "BF" not in dtype or arch.bf16
print(*sorted(hooks))
"""


def test_every_hook_with_a_kernel_is_compiled(run) -> None:
    import_free = {"allocate_kv", "copy_blocks", "swap_blocks", "pack_weight"}  # torch alone
    hooks = set(run(RECORDED, interpret=False).split())
    source = (KERNELS[0].parents[1].parent.parent / "interpreted" / "qiao_triton_interpreted.py").read_text("utf-8")
    offered = set(ast.literal_eval(re.search(r"__all__ = (\[.*?\])", source, re.DOTALL)[1]))
    device = {"capabilities", "capture", "memory_info", "probe_devices", "synchronize"}
    assert hooks == offered - import_free - device


@pytest.mark.parametrize("file", KERNELS, ids=lambda path: path.stem)
def test_kernels_keep_to_what_every_vendors_triton_has(file) -> None:
    code = file.read_text("utf-8")
    names = {n.attr for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Attribute)}
    assert not names & {"autotune", "heuristics", "make_block_ptr", "make_tensor_descriptor", "libdevice", "advance"}
    assert "inline_asm_elementwise" not in names
