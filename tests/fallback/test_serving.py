"""The same through the front door: arguments of the server, its refusal to start, the counters that it publishes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from qiao.build import build_engine
from qiao.config import EngineArgs
from qiao.errors import PlanRefusedError, PluginError
from qiao_conformance import sim

from tests.support.checkpoints import rand_checkpoint
from tests.support.fallback import PROMPTS, request


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return rand_checkpoint(tmp_path_factory.mktemp("rand"), architectures=["LlamaForCausalLM"])


def build(folder, **options):
    sim.setup(devices=2, memory=64 << 20)
    return build_engine(EngineArgs(model=str(folder), max_num_seqs=8, num_gpu_blocks_override=64, **options))


def tokens(engine):
    engine.add_request(request("0", PROMPTS[0]))
    found = []
    while engine.has_work():
        found += [token for output in engine.step() for token in output.token_ids]
    return found


@pytest.mark.parametrize("drop", [(), ("attention",), ("KV", "W", "S")], ids=lambda d: "+".join(d) or "nothing")
def test_a_checkpoint_on_the_second_device(folder, drop):
    wanted = tokens(build(folder, device="cpu").engine)
    built = build(folder, device="sim:1", drop=drop, fallback="allow")
    assert built.info.device == "sim:1"
    assert sim.STATE.devices[1].used > 0 and sim.STATE.devices[0].used == 0
    assert tokens(built.engine) == wanted
    counts = {c.operator: c for c in built.engine.stats().fallbacks if c.calls}
    assert ("attention" in counts) == bool(drop)
    if drop:
        assert counts["attention"].bytes_to_host > 0 and counts["attention"].seconds > 0
    assert {o["operator"] for o in built.info.plan["operators"] if o["gap"]} >= set(drop) & {"attention"}


def test_a_cache_that_the_device_lacks_lies_on_the_host_by_the_policy(folder):
    wanted = tokens(build(folder, device="reference", kv_cache_dtype="int8").engine)
    built = build(folder, device="sim", kv_cache_dtype="int8", fallback="allow")
    assert built.info.plan["kv"]["place"] != "sim" and built.info.kv_cache_dtype == "int8"
    assert tokens(built.engine) == wanted
    with pytest.raises(PlanRefusedError, match="not of int8: set --kv-cache-dtype"):
        build(folder, device="sim", kv_cache_dtype="int8", fallback="deny")


def test_deny_refuses_before_any_weight_is_read(folder, monkeypatch):
    monkeypatch.setattr("qiao.build.iter_weights", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(PlanRefusedError, match=r"attention \(left out by --drop\)"):
        build(folder, device="sim", drop=("attention",), fallback="deny")
    with pytest.raises(PlanRefusedError, match="budget"):
        build(folder, device="sim", drop=("attention",), fallback_budget=1)


def test_an_explicit_device_is_never_the_cpu(folder):
    with pytest.raises(PluginError, match="MetaX"):
        build(folder, device="maca")


def test_the_server_refuses_to_start_and_says_why(folder):
    flags = ["--port", "0", "--device", "sim", "--drop", "attention", "--fallback", "deny"]
    command = [sys.executable, "-m", "qiao.cli.main", "serve", str(folder), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode not in (0, None)
    assert "attention (left out by --drop)" in done.stderr + done.stdout
