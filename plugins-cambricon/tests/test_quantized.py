"""Quantized checkpoints on the stand-in SDK beside a float model of their values, in a process of its own.

What the kernels do not take is dequantized at load, in the 16 bits of its scales: its logits are those of the values so
rounded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]

CASES = "gptq-short-group gptq-4-sym gptq-128 gptq-8-sym gptq-act-order awq-gemm w4a16-group w8a16-channel fp8-tensor"
"""Names in ``tests/quantization/test_checkpoints.py``; ``QIAO_CASES=all`` takes every one."""

CODE = """
import os, sys, tempfile
from pathlib import Path
import qiao_cambricon, qiao_reference, torch
from qiao.registry import backend_of
from tests.quantization.test_checkpoints import CASES, float_config
from tests.support.quantized import IDS, float_logits, load, logits, place
from tests.support.quantizers import quantized_checkpoint
names = list(CASES) if os.environ.get("QIAO_CASES") == "all" else sys.argv[1:]
for name in names:
    with tempfile.TemporaryDirectory() as where:
        folder, values = quantized_checkpoint(Path(where) / "q", *CASES[name], attention_bias=True)
        backend = backend_of(qiao_cambricon, "cambricon", host=backend_of(qiao_reference, "reference"))
        plan, ops = place(folder, backend)
        found, config = logits(load(folder, ops), ops, IDS), float_config(folder)
        exact = torch.allclose(found, float_logits(config, values, IDS), atol=1e-3, rtol=1e-3)
        if not exact:
            halves = {n: v.half().float() if "_proj.weight" in n else v for n, v in values.items()}
            wanted = float_logits(config, halves, IDS)
            torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3, msg=lambda text: f"{name}: {text}")
        there = [scheme for scheme in plan.shape.schemes if not plan.moved(f"W[{scheme}]")]
        print(name, "exact" if exact else "rounded", *there)
"""


def test_logits_of_each_scheme() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("QIAO_")} | {"QIAO_MLU_CHIP": "MLU590"}
    env |= {k: v for k, v in os.environ.items() if k == "QIAO_CASES"}
    paths = [str(HERE / "src"), str(HERE / "stand_in"), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-c", CODE, *CASES.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert "w4a16" in said["gptq-4-sym"] and "w8a16" in said["gptq-8-sym"], "on the device, not on the host"
    assert said["w8a16-channel"].startswith("exact") and said["fp8-tensor"] == "exact dense", "fp8 is left to the host"
    print(done.stdout)
