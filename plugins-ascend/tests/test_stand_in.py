"""The plugin on the real torch_npu over stand-in libraries of CANN."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import qiao_ascend

from .conftest import environment

CASES = """
from itertools import islice
import qiao_ascend, qiao_reference
from qiao.contract.cases import cases
from qiao.registry import backend_of
from qiao_conformance import kit
from qiao_conformance.target import Target
backend = backend_of(qiao_ascend, "ascend", host=backend_of(qiao_reference, "reference"))
target = Target("ascend", backend.hooks, backend.device, backend.capabilities)
print(backend.device.chip, *backend.capabilities.dtypes, *backend.capabilities.schemes)
for hook in target.hooks:
    for case in islice(cases(hook, target.capabilities), 0, None, 4):
        kit.check_case(target, case)
kit.test_out_of_memory(target)
"""

A2 = {
    *("AddRmsNorm", "DynamicQuantV2", "FusedInferAttentionScoreV2", "GroupedMatmulV5", "Matmul", "QuantMatmulV5"),
    *("MoeGatingTopKSoftmax", "RmsNorm", "RotaryPositionEmbeddingV2", "ScatterPaKvCache", "Sort", "SwiGlu"),
    *("WeightQuantBatchMatmulV2",),
}


def traced(file: Path) -> set[str]:
    """Names of the kernels that were launched, with the route of those that are not aclnn's."""
    names = {line.split()[0] for line in file.read_text().splitlines()}
    return {name.removeprefix("aclnn").removesuffix("GetWorkspaceSize") for name in names}


@pytest.mark.parametrize(
    ("soc", "said", "kernels"),
    [
        ("Ascend910B3", "bfloat16 float16 dense w4a16 w8a16 w8a8", A2),
        ("Ascend910_9391", "bfloat16 float16 dense w4a16 w8a16 w8a8", A2),
        (
            "Ascend310P3",
            "float16 dense w4a16 w8a16",
            {"atb:PagedAttention", "atb:ReshapeAndCache", "aclop:RmsNorm", "aclop:RotaryMul", "aclop:AddRmsNorm"},
        ),
    ],
)
def test_cases_on_each_chip(run, tmp_path, soc, said, kernels) -> None:
    trace = tmp_path / "trace"
    assert run(CASES, soc, CANN_STUB_TRACE=str(trace)).strip() == f"{soc} {said}"
    assert kernels <= traced(trace)
    fused = {name for name in traced(trace) if name.startswith(("FusedInfer", "ScatterPa", "DynamicQuant"))}
    assert bool(fused) == (soc != "Ascend310P3")


RULES = """
import pytest, torch, torch_npu
def broken(words, function, *args, **options):
    with pytest.raises(RuntimeError, match=words):
        function(*args, **options)
def on(*shape, dtype=torch.float16):
    return torch.zeros(*shape).to(dtype).to("npu")
x = on(4, 2, 64)
cache = on(3, 128, 2, 64)
slots = on(4, dtype=torch.int32)
slots.copy_(torch.arange(4))
write = torch_npu.npu_scatter_pa_kv_cache
write(x, x, cache, cache.clone(), slots, cache_mode="Norm")
broken("cache_mode is Norm", write, x, x, cache, cache, slots)
broken("slots from 0", write, x, x, cache, cache, slots - 1, cache_mode="Norm")
broken("one dtype", write, x, x, on(3, 128, 2, 64, dtype=torch.bfloat16), cache, slots, cache_mode="Norm")
flat = cache.view(3, 128, -1)
mask = torch.ones(2048, 2048, dtype=torch.int8, device="npu").triu_(1)
good = dict(atten_mask=mask, actual_seq_lengths=[4], actual_seq_lengths_kv=[4], num_heads=2, num_key_value_heads=2,
    block_table=slots[None], block_size=128, input_layout="TND", sparse_mode=3)
fia = torch_npu.npu_fused_infer_attention_score
fia(x, flat, flat, **good)
broken("number of queries", fia, x, flat, flat, **{**good, "actual_seq_lengths": [3]})
broken("561002.*heads of 64", fia, on(4, 2, 80), on(3, 128, 160), on(3, 128, 160), **good)
broken("2048 by 2048", fia, x, flat, flat, **{**good, "atten_mask": None})
product = torch_npu.npu_weight_quant_batchmatmul
row, codes = on(2, 128), on(128, 16, dtype=torch.int8)
product(row, codes, on(4, 16), antiquant_group_size=32)
broken("one dtype", product, row, codes, on(4, 16, dtype=torch.float32), antiquant_group_size=32)
broken("group", product, row, codes, on(8, 16), antiquant_group_size=16)  # torch_npu's own check
broken("bias of torch.float32", product, row.bfloat16(), codes, on(16).bfloat16(), bias=on(16).bfloat16())
print("ok")
"""


def test_the_stand_in_keeps_the_documented_rules(run) -> None:
    assert run(RULES).strip() == "ok"


PLAN = """
import qiao_ascend, qiao_reference, torch
from qiao.models import describe
from qiao.registry import FallbackCounters, Policy, backend_of, confirm, make_plan
from qiao_conformance import reality
backend = backend_of(qiao_ascend, "ascend", host=backend_of(qiao_reference, "reference"))
shape = describe(reality.config(backend.capabilities))
plan, table = confirm(make_plan(shape, backend, Policy.parse("allow")), backend, FallbackCounters())
print(sorted(row.operator for row in plan.fallback_rows))
print(sorted(plan.failed))
print(*(reason.splitlines()[0] for reason in plan.failed.values()), sep="|")
"""


def planned(run, *args, **environment) -> tuple[str, str, str]:
    """(operators on the host, operators that failed, what they said)."""
    return tuple(run(PLAN, *args, **environment).splitlines()[:3])


KV = "['allocate_kv', 'attention', 'copy_blocks', 'prepare_attention', 'swap_blocks', 'write_kv']"


def test_without_faults_nothing_is_on_the_host(run) -> None:
    assert planned(run) == ("[]", "[]", "")
    assert planned(run, "Ascend310P3") == ("[]", "[]", "")


def test_an_older_cann_lacks_kernels(run_lacking, tmp_path) -> None:
    """torch_npu takes the older route for the norm; there is none for the others. 910B has no use for ATB."""
    trace = tmp_path / "trace"
    host, failed, said = planned(run_lacking, CANN_STUB_TRACE=str(trace))
    assert (host, failed) == (KV, "['attention', 'silu_mul']")
    assert "aclnnFusedInferAttentionScoreV2" in said and "aclnnSwiGlu" in said and "not in libopapi.so" in said
    assert "aclop:AddRmsNorm" in traced(trace)


def test_without_atb_a_310p_keeps_its_cache_on_the_host(run_lacking) -> None:
    host, failed, said = planned(run_lacking, "Ascend310P3")
    assert (host, failed) == (KV, "['silu_mul', 'write_kv']")
    assert "NotImplementedError: ATB (libatb.so) is not there: install NNAL" in said


def test_refused_kernels(run) -> None:
    host, failed, said = planned(run, CANN_STUB_FAIL="aclnnSwiGlu=561103,aclnnMatmul=161002,aclnnSort=561002")
    assert host == "['apply_penalties', 'logprobs', 'matmul', 'pack_weight', 'sample']"
    assert failed == "['matmul', 'sample', 'silu_mul']"
    assert "161002" in said and "561103" in said and "561002" in said


STATES = """
import qiao_ascend, qiao_reference
from qiao.errors import PluginError
from qiao.registry import backend_of
print([info.name for info in qiao_ascend.probe_devices()])
try:
    backend_of(qiao_ascend, "ascend", host=backend_of(qiao_reference, "reference"))
except PluginError as error:
    print(error)
"""


def test_no_device(run) -> None:
    assert run(STATES, CANN_STUB_DEVICES="2").strip() == "['ascend:0', 'ascend:1']"
    assert run(STATES, CANN_STUB_DEVICES="0").splitlines() == ["[]", "plugin ascend finds no device on this machine"]


def test_an_ailing_npu_is_named(run, tmp_path) -> None:
    recording = Path(__file__).parents[2] / "tests" / "doctor" / "recordings" / "npu-smi-910B3.txt"
    tool = tmp_path / "npu-smi"
    tool.write_text(f"#!/bin/sh\ncat {recording}\n")
    tool.chmod(0o755)
    said = run(
        "import qiao_ascend; print(qiao_ascend.probe_devices()[0].evidence)", PATH=f"{tmp_path}:{os.environ['PATH']}"
    )
    assert "NPU 1 reports Warning" in said and "torch-npu 2.13.0" in said


COLLECTIVE = """
import torch, torch.distributed as together
import qiao_ascend
name = qiao_ascend.collective_backend()
together.init_process_group(name, rank=0, world_size=1, store=together.HashStore())
x = torch.ones(3).to("npu:0")
together.all_reduce(x)
print(name, together.get_backend(), x.cpu().tolist())
"""


def test_the_collective_backend_is_torch_npus(run) -> None:
    assert run(COLLECTIVE).strip() == "hccl hccl [1.0, 1.0, 1.0]"


FULL = """
import qiao_ascend, qiao_reference
from qiao.models import describe
from qiao.registry import Policy, backend_of, make_plan
from qiao_conformance import reality
backend = backend_of(qiao_ascend, "ascend", host=backend_of(qiao_reference, "reference"))
settings, real = reality.config(backend.capabilities), reality.EngineConfig
plan = make_plan(describe(settings), backend, Policy.parse("allow"))
reality.EngineConfig = lambda **sizes: real(**{**sizes, "num_blocks": 4000})
try:
    reality.run(settings, backend, plan)
except Exception as error:
    print(type(error).__name__, error)
reality.EngineConfig = real
print(len(reality.run(settings, backend, plan)))
"""


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend310P3"])
def test_out_of_memory_is_said_and_the_device_works_on(run, soc) -> None:
    said = run(FULL, soc, CANN_STUB_HBM="96").splitlines()
    assert "OutOfMemoryError" in said[0] and "out of memory" in said[0] and said[-1] == "3"


REFUSED = """
import sys, qiao_ascend
try:
    qiao_ascend.probe_devices()
except RuntimeError as error:
    print(error)
"""

BEFORE_IMPORT = """
import sys
from importlib.abc import MetaPathFinder
class Never(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "torch_npu", "imported before versions were looked at"
for name in [n for n in sys.modules if n.partition(".")[0] == "torch_npu"]:
    del sys.modules[name]
sys.meta_path.insert(0, Never())
from qiao_ascend import _sdk
_sdk.find_spec = lambda name: object()
"""


def test_what_cannot_be_used_is_said(run, tmp_path) -> None:
    assert "no profile of Ascend910A" in run(REFUSED, "Ascend910A")
    (tmp_path / "version.info").write_text("Ascend-cann-atb : 8.5.0\n")
    (tmp_path / "cann").mkdir()
    (tmp_path / "cann" / "version.cfg").write_text("version=8.3.RC1\n")
    said = run(BEFORE_IMPORT + REFUSED, ATB_HOME_PATH=str(tmp_path), ASCEND_HOME_PATH=str(tmp_path / "cann"))
    assert said.startswith("NNAL 8.5.0 is wrong for CANN 8.3.RC1")


def test_without_cann_the_message_says_what_to_do(stand_in) -> None:
    command = [sys.executable, "-c", REFUSED]
    place = environment(stand_in, "Ascend910B3", QIAO_ASCEND_STAND_IN="")
    done = subprocess.run(command, capture_output=True, text=True, env=place, timeout=120, check=True)
    assert "libhccl.so" in done.stdout and "set_env.sh" in done.stdout


def test_without_torch_npu_there_is_no_device_and_no_error() -> None:
    """Here, where it is not on the path."""
    assert qiao_ascend.probe_devices() == []
    assert "bfloat16" in qiao_ascend.capabilities("").dtypes
    assert "torch_npu" not in sys.modules


GRAPHS = """
import os, pytest, torch
import qiao_ascend, qiao_reference
from qiao.registry import backend_of
from qiao_ascend import graphs
from qiao_conformance import captured
from qiao_conformance.target import Target
backend = backend_of(qiao_ascend, "ascend", host=backend_of(qiao_reference, "reference"))
target = Target("ascend", backend.hooks, backend.device, backend.capabilities)
for dtype in target.capabilities.dtypes:
    captured.check_replays(target, dtype)
captured.check_host_value(target)
captured.check_errors(target)
right = graphs.Replay.__call__
graphs.Replay.__call__ = lambda self: (self._graph.replay(), self._outputs)[1]  # with the lengths of before
with pytest.raises(AssertionError, match="of a replay is off"):
    captured.check_replays(target, "float16")
graphs.Replay.__call__ = right
x = torch.ones(2, 3).half().to("npu:0")
for refused in (lambda x: x[x > 0], lambda x: x + torch.ones(3).half().to("npu:0"), lambda x: x.cpu()):
    with pytest.raises(NotImplementedError, match="cannot record it"):
        qiao_ascend.capture(refused, (x,), "npu:0")
os.environ["ASCEND_LAUNCH_BLOCKING"] = "1"
with pytest.raises(NotImplementedError, match="ASCEND_LAUNCH_BLOCKING is set"):
    qiao_ascend.capture(lambda x: x, (x,), "npu:0")
print("ok")
"""


def test_graphs_follow_their_buffers_and_refuse_the_host(run) -> None:
    assert run(GRAPHS).strip() == "ok"


ALONE = """
import qiao_ascend, torch
x = torch.ones(2, 3).half().to("npu:0")
try:
    qiao_ascend.capture(lambda x: x, (x,), "npu:0")
except NotImplementedError as error:
    print(error)
"""


def test_a_310p_records_no_graphs(run) -> None:
    assert run(ALONE, "Ascend310P3").startswith("310P records no graphs")


TOKENS = """
import qiao_ascend, qiao_reference
from qiao.models import describe
from qiao.registry import Policy, backend_of, make_plan
from qiao_conformance import reality
reference = backend_of(qiao_reference, "reference")
backend = backend_of(qiao_ascend, "ascend", host=reference)
settings = {**reality.config(backend.capabilities), "torch_dtype": "float16"}
shape, policy = describe(settings), Policy.parse("allow")
want = reality.run(settings, reference, make_plan(shape, reference, policy))
for drop in ("", "allocate_kv", "attention", "sample", "matmul"):
    plan = make_plan(shape, backend, policy, drop=(drop,) if drop else ())
    groups = sorted({row.group for row in plan.fallback_rows})
    print(drop, groups, reality.run(settings, backend, plan, eager=bool(drop)) == want)
"""


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend310P3"])
def test_the_cpus_tokens_whatever_family_is_missing(run, tmp_path, soc) -> None:
    trace = tmp_path / "trace"
    assert run(TOKENS, soc, CANN_STUB_TRACE=str(trace)).splitlines() == [
        " [] True",
        "allocate_kv ['KV'] True",
        "attention ['KV'] True",
        "sample ['S'] True",
        "matmul ['W[dense]'] True",
    ]
    assert ("aclmdlRIExecuteAsync" in traced(trace)) == (soc == "Ascend910B3")
