"""Loading takes the model and at most one shard more, measured as the process's peak of resident memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import rand_checkpoint

SLACK = 48 << 20
"""The allocator's arenas, thread stacks, and what Python itself takes while loading."""

LOAD = """
import json, sys
from qiao.build import build_engine
from qiao.config import EngineArgs

def figure(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))

build_engine(EngineArgs(model=sys.argv[1], device="cpu", num_gpu_blocks_override=4, threads=1))  # imports, caches
before = figure("VmRSS")
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")
engine = build_engine(EngineArgs(model=sys.argv[2], device="cpu", num_gpu_blocks_override=4, threads=1)).engine
print(json.dumps({"before": before, "peak": figure("VmHWM")}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's memory figures")
def test_peak_is_the_model_and_one_shard(tmp_path: Path) -> None:
    small = rand_checkpoint(tmp_path / "small")
    large = rand_checkpoint(
        tmp_path / "large", max_shard_size="50MB", hidden_size=1024, intermediate_size=2816, num_hidden_layers=6
    )
    shards = [file.stat().st_size for file in large.glob("*.safetensors")]
    assert len(shards) >= 5, "one shard would prove nothing"
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(small), str(large)], capture_output=True, text=True, check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    growth = figures["peak"] - figures["before"]
    assert growth > 0.8 * sum(shards), "the weights were not measured"
    assert growth <= sum(shards) + max(shards) + SLACK
