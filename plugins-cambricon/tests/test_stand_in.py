"""The plugin on the stand-in SDK, and the rules of the stand-in, each in a process of its own: torch has one slot."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import qiao_cambricon
import torch

from tests.support.forks import Forks

HERE = Path(__file__).resolve().parents[1]
Runner = Callable[..., str]

PRELOAD = """
import pytest, torch
import qiao_cambricon, qiao_reference
from qiao.contract import cases
from qiao.models import describe
from qiao.registry import backend_of
from qiao_conformance import kit, sim
from qiao_conformance.target import Target
"""
"""The stand-in itself is imported in each child: which chip and which release it is, is read then."""


@pytest.fixture(scope="module")
def run() -> Iterator[Runner]:
    """``run(code, chip, release)``: what the code printed; its failure is the test's."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("QIAO_")}
    paths = [str(HERE / "src"), str(HERE / "stand_in"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "QIAO_SIM_NAME": "mlu"}
    env.pop("CNCL_ASYNC_ERROR_HANDLING", None)

    with Forks(PRELOAD, env) as forks:

        def call(code: str, chip: str = "MLU590", release: str = "") -> str:
            done = forks.run(code, {"QIAO_MLU_CHIP": chip, "QIAO_MLU_OPS": release})
            assert done.returncode == 0, done.stderr[-3000:]
            return done.stdout

        yield call


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
called = set()
for hook in target.hooks:
    for case in islice(cases(hook, target.capabilities), 0, None, 7):
        kit.check_case(target, case)
        called.add(hook)
for dtype in target.capabilities.dtypes:
    kit.test_replays_follow_their_buffers(target, dtype)
kit.test_capture_refuses_what_it_cannot_follow(target)
kit.test_plan_and_reality_agree(target)
print(*sorted(set(target.hooks) - called))
"""


@pytest.mark.parametrize(
    ("chip", "release", "said"),
    [
        ("MLU590", "", "MLU590 bfloat16 float16 float32 dense w4a16 w8a16 w8a8"),
        ("MLU370", "old", "MLU370 float16 float32 dense w4a16 w8a16 w8a8"),
    ],
)
def test_cases_on_each_chip_and_release(run: Runner, chip: str, release: str, said: str) -> None:
    without_cases = "capabilities capture collective_backend memory_info pack_weight probe_devices synchronize"
    assert run(CHECK, chip, release).splitlines() == [said, without_cases]


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
half, narrow = x.half(), torch.ones(8, 2, device="mlu").half()
four = (half, codes, None, narrow, torch.float16, None, None, "none", 4)
broken("group size 32", tmo.scaled_matmul, *four, a_quant_bit_size=-1)
broken("-1 for plain activations", tmo.scaled_matmul, *four)
broken("float16 or bfloat16", tmo.scaled_matmul, x, codes, None, narrow, torch.float32, quant_bit_size=4)
int8, scales = torch.zeros(3, 2, 16, 64, dtype=torch.int8, device="mlu"), torch.zeros(3, 2, 16, device="mlu")
tmo.quant_to_paged_cache(kv, kv, int8, int8.clone(), scales, scales.clone(), slots)
assert sim.peek(scales).count_nonzero() == 3 * 2
broken("caches are int8", tmo.quant_to_paged_cache, kv, kv, cache, cache, scales, scales, slots)
broken("scales are float32", tmo.quant_to_paged_cache, kv, kv, int8, int8, scales.half(), scales.half(), slots)
read = (q, int8, int8, out, table, lens)
broken("come with scales", tmo.single_query_cached_kv_attn, *read, None, None, None, 20, -1, -1, 0.125)
broken("must not alias", tmo.single_query_cached_kv_attn, q, cache, cache, q, *decode[4:], 20, -1, -1, 0.125)
wide = torch.zeros(20, 2, 64, device="mlu")
broken("16 bits", tmo.dequant_from_paged_cache, wide, wide, int8, int8, scales, scales, lens, 20, None, table, 1, 8)
half = wide.half()
broken("max_context", tmo.dequant_from_paged_cache, half, half, int8, int8, scales, scales, lens, 9, None, table, 1, 8)
turned, angle = torch.randn(1, 4, 2, 64).half().to("mlu"), torch.zeros(4, 64, device="mlu").half()
rest = (None, None, False, False, False, 4)
assert tmo.apply_rotary(turned, angle, angle, *rest) is turned and not sim.peek(turned).any(), "in place"
broken("tables are of the input's dtype", tmo.apply_rotary, turned, angle.float(), angle.float(), *rest)
broken("float16 or bfloat16", tmo.apply_rotary, turned.float(), angle, angle, *rest)
broken("63 rotated", tmo.apply_rotary, turned, angle[:, :63].contiguous(), angle[:, :63].contiguous(), *rest)
big = torch.zeros(1, 4, 2, 258, device="mlu").half()
broken("head size 258", tmo.apply_rotary, big, angle, angle, *rest)
broken("float16 or bfloat16", tmo.fused_rms_norm, x, None, x[0], None, None, 1e-5, False)
chosen = torch.tensor([[1], [0], [1]], dtype=torch.int32).to("mlu")
expand, combine, counts, sums = (sim.peek(t).tolist() for t in tmo.moe_gen_idx(chosen, 3))
assert (expand, combine, counts, sums) == ([1, 0, 2], [1, 0, 2], [1, 2, 0], [0, 1, 3, 3])
broken("int32", tmo.moe_gen_idx, chosen.long(), 3)
broken("no such expert", tmo.moe_gen_idx, chosen, 1)
experts, rows = torch.zeros(3, 8, 64, device="mlu"), x[:3].contiguous()
m = torch.tensor([1, 2, 0], dtype=torch.int32).to("mlu")
broken("max_m", tmo.group_gemm, rows, experts, m, None, None, None, None, 1)
broken("counts add up", tmo.group_gemm, x, experts, m, None, None, None, None, 9)
i8, one = torch.zeros(3, 64, dtype=torch.int8, device="mlu"), torch.ones(3, device="mlu")
weights8, scale8 = torch.zeros(3, 8, 64, dtype=torch.int8, device="mlu"), torch.ones(3, 8, device="mlu")
grouped = (i8, weights8, m, None, None, None, None, one, scale8)
broken("float16 or bfloat16", tmo.smooth_quant_group_gemm, *grouped, torch.float32, 3)
broken("weights are float32", tmo.moe_combine_result, rows, one.half(), expand_ := m, None, None, 0, 0)
assert not hasattr(tmo, "weight_only_quant_matmul") and not hasattr(tmo, "smooth_quant_matmul")
print("ok")
"""


def test_the_stand_in_keeps_the_documented_rules(run: Runner) -> None:
    assert run(RULES).strip() == "ok"


OLD_RULES = """
import pytest, torch
import torch_mlu, torch_mlu_ops as tmo
assert not hasattr(tmo, "scaled_matmul") and not hasattr(tmo, "scaled_quantize")
def broken(words, function, *args):
    with pytest.raises(tmo.RuleError, match=words):
        function(*args)
x, codes = torch.randn(4, 128).to("mlu"), torch.zeros(8, 128, dtype=torch.int8, device="mlu")
rows, groups = torch.ones(8, device="mlu"), torch.ones(8, 2, device="mlu")
for scale in (rows, groups):
    assert tmo.weight_only_quant_matmul(x, codes, scale, None, None, None, "none", 8).shape == (4, 8)
broken("symmetric", tmo.weight_only_quant_matmul, x, codes, groups, groups, None, None, "none", 8)
broken("group size 32", tmo.weight_only_quant_matmul, x, codes, torch.ones(8, 4).to("mlu"), None, None, None, "none", 8)
broken("a's dtype", tmo.weight_only_quant_matmul, x.half(), codes, groups, None, None, None, "none", 8)
broken("float32 scale for each row", tmo.weight_only_quant_matmul, x, codes, rows.half(), None, None, None, "none", 8)
broken("smooth", tmo.per_token_smooth_quantize, x, rows)
print("ok")
"""


def test_the_stand_in_keeps_the_rules_of_older_releases(run: Runner) -> None:
    assert run(OLD_RULES, "MLU370", "old").strip() == "ok"


MANY_HEADS = """
import torch_mlu, torch_mlu_ops
import qiao_cambricon, qiao_reference, torch
from qiao.contract.cases import Random, paged
from qiao.contract.cases.base import Case
from qiao.registry import backend_of
from qiao_conformance import kit, sim
from qiao_conformance.target import Target
backend = backend_of(qiao_cambricon, "cambricon", host=backend_of(qiao_reference, "reference"))
target = Target("cambricon", backend.hooks, backend.device, backend.capabilities)
for dtype, kept, calls in (("float16", "float16", 3), ("bfloat16", "bfloat16", 2), ("float16", "int8", 3)):
    batch, kind = paged.Batch("many", (1, 1), (17, 3), 300 * 2, 2), paged.Kind(dtype, kept, "HND", 16, 32)
    arguments = paged.attention_arguments(Random("many", 0), batch, kind)
    with sim.counted() as c:
        kit.check_case(target, Case("decode_attention", "many", dtype, arguments, ""))
    print(c.ops["hook.tmo.single_query_cached_kv_attn"])
    assert c.ops["hook.tmo.single_query_cached_kv_attn"] == calls
"""


def test_more_heads_than_a_decode_takes_go_in_several(run: Runner) -> None:
    assert run(MANY_HEADS).split() == ["3", "2", "3"]


GRAPHS = """
import torch_mlu, torch_mlu_ops
import os, pytest, torch
import qiao_cambricon, qiao_reference
from qiao.contract import UnreadLengths
from qiao.registry import backend_of
from qiao_cambricon import rules
from qiao_conformance import kit, sim
from qiao_conformance.target import Target
backend = backend_of(qiao_cambricon, "cambricon", host=backend_of(qiao_reference, "reference"))
target = Target("cambricon", backend.hooks, backend.device, backend.capabilities)
weight, x = torch.ones(8, device="mlu").half(), torch.randn(2, 8).half().to("mlu")
def normed(x):
    return qiao_cambricon.silu_mul(qiao_cambricon.rms_norm(x, weight, 1e-5))
replay = qiao_cambricon.capture(normed, (x,), "mlu:0")
with sim.counted() as c:
    first = replay()
assert c["launches"] == 1 and replay() is first
for function in (lambda x: x.cpu(), lambda x: x * x[0, 0].item(), lambda x: x + torch.ones(8).half().to("mlu")):
    with pytest.raises(NotImplementedError, match="not permitted when stream is capturing"):
        qiao_cambricon.capture(function, (x,), "mlu:0")
right = rules.longest
rules.longest = lambda kv_lens: 8 if isinstance(kv_lens, UnreadLengths) else max(kv_lens)  # true while recording
with pytest.raises(AssertionError, match="of a replay is off"):
    kit.test_replays_follow_their_buffers(target, "float32")
rules.longest = right
kit.test_replays_follow_their_buffers(target, "float32")
os.environ["CNCL_ASYNC_ERROR_HANDLING"] = "1"
with pytest.raises(NotImplementedError, match="CNCL_ASYNC_ERROR_HANDLING is set"):
    qiao_cambricon.capture(lambda x: x, (x,), "mlu:0")
print("ok")
"""


def test_graphs_are_one_launch_and_refuse_the_host(run: Runner) -> None:
    assert run(GRAPHS).strip() == "ok"


EXPERTS = """
import torch_mlu, torch_mlu_ops
import torch
import qiao_cambricon
from qiao.contract import WeightInfo
from qiao_conformance import sim
info = WeightInfo("w", 8, 4)
whole = [torch.randn(4, 8).half() for _ in range(3)]
weights = tuple(qiao_cambricon.pack_weight("dense", {"weight": w}, info, "mlu:0") for w in whole)
x, experts = torch.randn(5, 8).half().to("mlu"), torch.tensor([2, 0, 2, 1, 2]).to("mlu")
first = sim.peek(qiao_cambricon.expert_matmul(x, weights, experts)).clone()
held = torch.mlu.memory_allocated()
with sim.counted() as c:
    again = sim.peek(qiao_cambricon.expert_matmul(x, weights, experts))
assert torch.equal(first, again) and (c["d2h"], c["syncs"]) == (0, 0)
assert c.ops["hook.tmo.group_gemm"] == 1 and c.ops["aten.stack"] == 0
assert sum(w.nbytes for w in weights) == 3 * 4 * 8 * 2
for i, e in enumerate([2, 0, 2, 1, 2]):
    torch.testing.assert_close(first[i], sim.peek(x)[i] @ whole[e].T, rtol=1e-2, atol=1e-2)
print("ok")
"""


def test_experts_are_one_call_and_held_once(run: Runner) -> None:
    assert run(EXPERTS).strip() == "ok"


def test_without_the_sdk_there_is_no_device_and_no_error() -> None:
    """Here, where it is not on the path."""
    assert qiao_cambricon.probe_devices() == []
    assert "bfloat16" not in qiao_cambricon.capabilities("MLU370-X8").dtypes
    assert "bfloat16" in qiao_cambricon.capabilities("").dtypes
    assert not hasattr(torch, "mlu")


REFUSED = """
import torch_mlu, torch_mlu_ops, torch
import qiao_cambricon, qiao_reference
from qiao.contract import WeightInfo
from qiao.models import describe
from qiao.quantization.packing import promised
from qiao.quantization.weight import WeightForm
from qiao.registry import Policy, backend_of, make_plan
from qiao_conformance import reality
backend = backend_of(qiao_cambricon, "cambricon", host=backend_of(qiao_reference, "reference"))
settings = reality.config(backend.capabilities)
def moved(quantized={}, **more):
    plan = make_plan(describe({**settings, **more}, quantized), backend, Policy.parse("allow"))
    rows = plan.fallback_rows
    print(sorted({row.group for row in rows}), "|".join(sorted({row.reason for row in rows})))
moved()
capped = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0}
moved(**capped, query_pre_attn_scalar=32, sliding_window=64, hidden_activation="gelu_pytorch_tanh")
moved({"model.layers.0.mlp.down_proj.weight": promised(WeightForm("fp8"), reality.HIDDEN, reality.FEED)})
try:
    qiao_cambricon.pack_weight("fp8", {}, WeightInfo("lm_head", 8, 8, 8), "mlu:0")
except ValueError as error:
    print(error)
"""


def test_a_soft_cap_and_fp8_are_planned_on_the_cpu(run: Runner) -> None:
    plain, capped, fp8, packed = run(REFUSED).splitlines()
    assert plain.startswith("[]")
    assert capped.startswith("['KV']") and "soft cap" in capped
    assert fp8.startswith("['W[fp8]']") and "fp8" in fp8
    assert packed == "lm_head: torch_mlu_ops has no operation for fp8"


OLDER = """
import torch_mlu_ops
del torch_mlu_ops.single_query_cached_kv_attn, torch_mlu_ops.scaled_quantize
import qiao_cambricon, pytest
assert qiao_cambricon.capabilities("MLU590").schemes == ("dense", "w4a16", "w8a16")
del torch_mlu_ops.quant_to_paged_cache
assert "int8" not in qiao_cambricon.capabilities("MLU590").kv_dtypes
from qiao_cambricon import _sdk
with pytest.raises(NotImplementedError, match="torch_mlu_ops stand-in has no single_query_cached_kv_attn"):
    _sdk.operation("single_query_cached_kv_attn")
print("ok")
"""


def test_an_operation_that_a_release_lacks_is_said(run: Runner) -> None:
    assert run(OLDER).strip() == "ok"
