"""The plugin on the stand-in SDK, and the rules of the stand-in, each in a process of its own: torch has one slot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]


def run(code: str, chip: str = "MLU590", release: str = "") -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("QIAO_")}
    paths = [str(HERE / "src"), str(HERE / "stand_in"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "QIAO_MLU_CHIP": chip, "QIAO_MLU_OPS": release}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CHECK = """
from itertools import islice
import qiao_cambricon
from qiao.contract.cases import cases
from qiao.registry import backend_of
from qiao_conformance import kit
from qiao_conformance.target import Target
import qiao_reference
backend = backend_of(qiao_cambricon, "cambricon", host=backend_of(qiao_reference, "reference"))
target = Target("cambricon", backend.hooks, backend.device, backend.capabilities)
print(backend.device.chip, *backend.capabilities.dtypes, *backend.capabilities.schemes)
for hook in ("allocate_kv", "copy_blocks", "write_kv", "attention", "decode_attention", "matmul", "add_rms_norm"):
    step = 5 if "attention" in hook or hook == "write_kv" else 1
    for case in islice(cases(hook, target.capabilities), 0, None, step):
        kit.check_case(target, case)
"""


@pytest.mark.parametrize(
    ("chip", "release", "said"),
    [
        ("MLU590", "", "MLU590 bfloat16 float16 float32 dense w4a16 w8a8"),
        ("MLU370", "old", "MLU370 float16 float32 dense w4a16 w8a8"),
    ],
)
def test_cases_on_each_chip_and_release(chip: str, release: str, said: str) -> None:
    assert run(CHECK, chip, release).strip() == said


RULES = """
import pytest, torch
import torch_mlu, torch_mlu_ops as tmo
from qiao_conformance import sim
x = torch.randn(4, 64).to("mlu")
def broken(words, function, *args, **options):
    with pytest.raises(tmo.RuleError, match=words):
        function(*args, **options)
cache = torch.zeros(3, 2, 16, 64, device="mlu")
kv = torch.randn(4, 2, 64).to("mlu")
slots = torch.tensor([1, 2, -1, 40], dtype=torch.int32).to("mlu")
tmo.reshape_paged_cache(kv, kv, cache, cache.clone(), slots)
assert sim.peek(cache).flatten(0, 0).abs().sum(dim=(1, 3)).count_nonzero() == 3
broken("int32", tmo.reshape_paged_cache, kv, kv, cache, cache, slots.long())
broken("contiguous", tmo.reshape_paged_cache, kv.transpose(0, 1), kv, cache, cache, slots)
broken("one dtype", tmo.reshape_paged_cache, kv.half(), kv.half(), cache, cache, slots)
broken("must be on mlu", tmo.matmul, x.cpu(), x)
q, out = torch.randn(1, 1, 2, 64).to("mlu"), torch.zeros(1, 1, 2, 64, device="mlu")
table, lens = (torch.tensor(v, dtype=torch.int32).to("mlu") for v in ([[0, 1]], [20]))
decode = (q, cache, cache, out, table, lens, None, None, None)
def attend(longest):
    return sim.peek(tmo.single_query_cached_kv_attn(*decode, longest, -1, -1, 0.125)).clone()
whole = attend(20)
assert torch.equal(whole, attend(-1)) and not torch.equal(whole, attend(7)), "too small a maximum is silently wrong"
broken("windows_size_right", tmo.single_query_cached_kv_attn, *decode, 20, -1, 0, 0.125)
many = torch.zeros(1, 1, 258, 64, device="mlu")
broken("above 128", tmo.single_query_cached_kv_attn, many, cache, cache, many.clone(), *decode[4:], 20, -1, -1, 0.125)
cu = torch.tensor([0, 4], dtype=torch.int32).to("mlu")
prefill = (cu, cu, None, None, 4, 4, 0.125, True)
broken("must not alias", tmo.flash_attention, kv, kv, kv, kv, *prefill)
wide = torch.zeros(3, 2, 32, 64, device="mlu")
broken("blocks of 16", tmo.flash_attention, kv, wide, wide, kv.clone(), *prefill, block_tables=table)
codes = torch.zeros(8, 32, dtype=torch.int8, device="mlu")
narrow = torch.ones(8, 2, device="mlu")
broken("group size 32", tmo.scaled_matmul, x, codes, None, narrow, torch.float32, quant_bit_size=4)
print("ok")
"""


def test_the_stand_in_keeps_the_documented_rules() -> None:
    assert run(RULES).strip() == "ok"


QUIET = """
import sys
sys.path = [p for p in sys.path if not p.endswith("stand_in")]
import qiao_cambricon
assert qiao_cambricon.probe_devices() == []
assert "bfloat16" not in qiao_cambricon.capabilities("MLU370-X8").dtypes
assert "bfloat16" in qiao_cambricon.capabilities("").dtypes
import torch
assert not hasattr(torch, "mlu")
print("ok")
"""


def test_without_the_sdk_there_is_no_device_and_no_error() -> None:
    assert run(QUIET).strip() == "ok"


OLDER = """
import torch_mlu_ops
del torch_mlu_ops.single_query_cached_kv_attn, torch_mlu_ops.scaled_quantize
import qiao_cambricon, pytest
assert qiao_cambricon.capabilities("MLU590").schemes == ("dense", "w4a16")
from qiao_cambricon import _sdk
with pytest.raises(NotImplementedError, match="torch_mlu_ops stand-in has no single_query_cached_kv_attn"):
    _sdk.operation("single_query_cached_kv_attn")
print("ok")
"""


def test_an_operation_that_a_release_lacks_is_said() -> None:
    assert run(OLDER).strip() == "ok"


@pytest.mark.parametrize(("block", "dim", "layout"), [(32, 64, "HND"), (16, 72, "HND"), (16, 64, "NHD")])
def test_a_cache_that_the_kernels_cannot_read_is_refused(block: int, dim: int, layout: str) -> None:
    code = f"""
import pytest
from qiao_cambricon.chips import check_cache, check_decode
check_cache(16, 64, "HND"); check_decode(128, 1)
with pytest.raises(ValueError, match="torch_mlu_ops has no"):
    check_cache({block}, {dim}, {layout!r})
with pytest.raises(ValueError, match="128 to one"):
    check_decode(129, 1)
print("ok")
"""
    assert run(code).strip() == "ok"
