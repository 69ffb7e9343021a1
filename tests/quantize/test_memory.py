"""Quantizing holds about a layer at a time: all tensors that live are counted while a run is at work."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from qiao.loading import resolve
from qiao.quantize import Device, Options, output, quantize

from tests.support.checkpoints import VOCAB, rand_checkpoint
from tests.support.models import cpu_ops, token_ids

WIDE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "tie_word_embeddings": True}
LAYER = 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768)
"""Bytes of a layer's linear weights in float32."""


def living() -> int:
    """Bytes of all tensors on the host, each storage once."""
    gc.collect()
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if issubclass(type(x), torch.Tensor) and x.device.type == "cpu"
    }
    return sum(storages.values())


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_a_run_holds_about_one_layer(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rand_checkpoint(tmp_path / "model", dtype="bfloat16", **WIDE)
    sequences = [token_ids(24, VOCAB, seed=i) for i in range(3)]
    options, device = Options(method=method, group=64), Device(cpu_ops(), torch.float32, 8)
    before, found, write = living(), [], output.Output.write_shard

    def counted(self: output.Output, index: int, tensors: Any) -> Path:
        found.append(living() - before)
        return write(self, index, tensors)

    monkeypatch.setattr(output.Output, "write_shard", counted)
    quantize(resolve(model), tmp_path / "out", options, device, sequences)
    layers = found[: WIDE["num_hidden_layers"]]
    assert min(layers) > LAYER, "the weights were not counted"
    # the layer as it was, as it is calibrated, and its rounded form with the sums of its inputs
    assert max(layers) < 4.5 * LAYER
    assert max(layers[4:]) < 1.05 * max(layers[:4]), "nothing is kept of the layers before"
    assert found[-1] < LAYER, "the rest is written alone"
