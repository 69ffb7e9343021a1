"""Quantized checkpoints on the stand-in NPU beside a float model: signs of zeros, orders, permutations."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import sys, tempfile
from pathlib import Path
import torch, torch_npu, qiao_ascend, qiao_reference
from qiao.registry import backend_of
sys.path.insert(0, {root!r})
from tests.quantization.test_checkpoints import CASES, ROUNDED, float_config
from tests.support import quantized
from tests.support.quantizers import quantized_checkpoint
quantized.BLOCK, quantized.BLOCKS = 128, 2  # what the chip takes
ids, half = quantized.IDS, torch.float16
reference = backend_of(qiao_reference, "reference")
for name in {names!r}:
    case, _, kind = name.partition("/")
    sizes = {{"attention_bias": True, "head_dim": 64, "dtype": "float16"}}
    if kind:
        sizes |= {{"hidden_size": 66, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 101}}
    with tempfile.TemporaryDirectory() as where:
        folder, values = quantized_checkpoint(Path(where) / "q", *{{**CASES, **ROUNDED}}[case], **sizes)
        wanted = quantized.float_logits(float_config(folder), {{n: v.float() for n, v in values.items()}}, ids)
        off = []
        for backend in (backend_of(qiao_ascend, "ascend", host=reference), reference):
            plan, ops = quantized.place(folder, backend)
            found = quantized.logits(quantized.load(folder, ops, half), ops, ids, half)
            off.append(float((found - wanted).norm() / wanted.norm()))
            if backend is not reference:
                moved = [scheme for scheme in plan.shape.schemes if plan.moved(f"W[{{scheme}}]")]
                said = [name, plan.shape.schemes[0], moved]
        print(*said, off[0] < 1.5 * off[1] + 1e-3, *off, sep=";")
"""

CASES = {
    "w4a16": ("gptq-4", "gptq-4-sym", "gptq-act-order", "gptq-short-group", "awq-zeros-of-0", "w4a16-asym/odd"),
    "w8a16": ("gptq-8", "w8a16-asym/odd", "llm-int8"),
    "w8a8": ("w8a8-dynamic",),
}
PAIRS = [("Ascend910B3", scheme) for scheme in CASES] + [("Ascend310P3", "w4a16"), ("Ascend310P3", "w8a16")]


@pytest.mark.parametrize(("soc", "scheme"), PAIRS)
def test_logits(run, soc, scheme) -> None:
    """In float16, as near to the float model as the reference plugin in float16 is; all on the chip."""
    said = [line.split(";") for line in run(CODE.format(root=str(ROOT), names=CASES[scheme]), soc).splitlines()]
    assert [line[:4] for line in said] == [[name, scheme, "[]", "True"] for name in CASES[scheme]], said
