"""Quantized checkpoints over the kernels in Triton's interpreter, beside a float model of their values."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

CODE = """
import sys, tempfile
from pathlib import Path
import qiao_reference, torch
import qiao_triton_interpreted as plugin
from qiao.registry import backend_of
sys.path.insert(0, sys.argv[1])
from tests.quantization.test_checkpoints import CASES, ROUNDED, float_config
from tests.support.quantized import IDS, float_logits, load, logits, place
from tests.support.quantizers import quantized_checkpoint
torch.set_num_threads(1)
ids, odd = IDS[:7], {"hidden_size": 66, "intermediate_size": 101, "num_attention_heads": 3, "num_key_value_heads": 1}
for name in sys.argv[2:]:
    case, _, kind = name.partition("/")
    sizes = {"num_hidden_layers": 1, "attention_bias": True} | ({**odd, "head_dim": 16} if kind else {})
    with tempfile.TemporaryDirectory() as where:
        folder, values = quantized_checkpoint(Path(where) / "q", *{**CASES, **ROUNDED}[case], **sizes)
        plan, ops = place(folder, backend_of(plugin, "triton", host=backend_of(qiao_reference, "reference")))
        found, wanted = logits(load(folder, ops), ops, ids), float_logits(float_config(folder), values, ids)
        moved = [scheme for scheme in plan.shape.schemes if plan.moved(f"W[{scheme}]")]
        near = torch.nn.functional.cosine_similarity(found, wanted, dim=-1).min() > 0.99
        right = near if case in ROUNDED else torch.allclose(found, wanted, atol=1e-3, rtol=1e-3)
        print(name, plan.shape.schemes[0], moved, bool(right), float((found - wanted).abs().max()), sep=";")
"""

CASES = {
    "w4a16": ("gptq-4", "gptq-act-order", "gptq-short-group", "awq-zeros-of-0", "w4a16-channel", "w4a16-asym/odd"),
    "w8a16": ("gptq-8-act-order", "w8a16-asym/odd", "llm-int8"),
    "fp8": ("fp8-tensor", "fp8-channel/odd"),
    "w8a8": ("w8a8-dynamic",),
}


@pytest.mark.parametrize("scheme", CASES)
def test_logits(run, scheme) -> None:
    """Within 1e-3 in float32; activations of ``w8a8`` are rounded, so only near."""
    said = [line.split(";") for line in run(CODE, str(ROOT), *CASES[scheme]).splitlines()]
    assert [line[:4] for line in said] == [[name, scheme, "[]", "True"] for name in CASES[scheme]], said
