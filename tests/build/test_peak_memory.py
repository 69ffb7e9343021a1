"""Loading takes the model and at most one shard more, measured as the process's peak of resident memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import edit_config, rand_checkpoint

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


needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's memory figures")


def growth_while_loading(folder: Path, small: Path) -> int:
    """Bytes by which loading ``folder`` raises the peak of a process that has loaded ``small``."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(small), str(folder)], capture_output=True, text=True, check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    return int(figures["peak"] - figures["before"])


@needs_linux
def test_peak_of_a_quantized_model_is_far_from_its_size_in_16_bits(tmp_path: Path) -> None:
    """4-bit GPTQ, a shard for each layer: the files' size and a shard more, and never the weights in 16 bits."""
    folder = rand_checkpoint(tmp_path / "q", hidden_size=1024, intermediate_size=2816, num_hidden_layers=8)
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    in_16_bits, sizes = 2 * sum(tensor.numel() for tensor in held.values()), []
    for layer in range(9):
        names = [n for n in held if (f".layers.{layer}." in n if layer < 8 else ".layers." not in n)]
        tensors = {part: x for name in names for part, x in _quantized(name, held[name]).items()}
        file = folder / f"model-{layer + 1:05d}-of-00009.safetensors"
        save_file(tensors, file, {"format": "pt"})
        sizes.append(file.stat().st_size)
    del held
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False})
    growth = growth_while_loading(folder, rand_checkpoint(tmp_path / "small"))
    assert 0.8 * sum(sizes) < growth <= 1.2 * sum(sizes) + max(sizes) + SLACK < in_16_bits


def _quantized(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random words in the place of a projection."""
    if "_proj" not in name:
        return {name: tensor}
    module, (rows, columns) = name.removesuffix(".weight"), tensor.shape

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32)

    return {
        f"{module}.qweight": words(columns // 8, rows),
        f"{module}.qzeros": words(columns // 128, rows // 8),
        f"{module}.scales": torch.full((columns // 128, rows), 0.01, dtype=torch.float16),
    }


@needs_linux
def test_peak_is_the_model_and_one_shard(tmp_path: Path) -> None:
    small = rand_checkpoint(tmp_path / "small")
    large = rand_checkpoint(
        tmp_path / "large", max_shard_size="50MB", hidden_size=1024, intermediate_size=2816, num_hidden_layers=6
    )
    shards = [file.stat().st_size for file in large.glob("*.safetensors")]
    assert len(shards) >= 5, "one shard would prove nothing"
    growth = growth_while_loading(large, small)
    assert growth > 0.8 * sum(shards), "the weights were not measured"
    assert growth <= sum(shards) + max(shards) + SLACK
