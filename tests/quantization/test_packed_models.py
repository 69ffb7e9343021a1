"""A model from packed weights on disk gives the logits of the model from its checkpoint, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from qiao.contract import PackedWeight, WeightInfo
from qiao.errors import ModelError
from qiao.loading import iter_weights, load_config, quantized_weights, resolve
from qiao.loading.packed_cache import PackedCache
from qiao.models import create, packing
from qiao.models.packing import load_kept

from tests.quantization.test_checkpoints import CASES
from tests.support.checkpoints import rand_checkpoint
from tests.support.gguf import write_gguf
from tests.support.quantized import BACKENDS, BLOCK, BLOCKS, IDS, backend_called, load, logits, place
from tests.support.quantizers import quantized_checkpoint

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "gemma2": {"model_type": "gemma2", "head_dim": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"model_type": "phi3"},
}
MIXTURES = {
    "q4_k_m": {"attn_v|ffn_down|token_embd": "Q6_K", "": "Q4_K"},
    "some_dense": {"attn_k|ffn_up": "F32", "output": "F16", "": "Q8_0"},
}
QUANTIZED = ("gptq-act-order", "Q4_1", "q4_k_m", "some_dense")


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_BYTES", 0)


def checkpoint(name: str, folder: Path) -> Path:
    if name in FAMILIES:
        return rand_checkpoint(folder, **FAMILIES[name])
    if name in CASES:
        return quantized_checkpoint(folder, *CASES[name])[0]
    plain = rand_checkpoint(folder, hidden_size=256, intermediate_size=256, tie_word_embeddings=name == "Q4_1")
    return write_gguf(plain, folder.with_suffix(".gguf"), MIXTURES.get(name, name))


def restore(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
    """What the reference plugin would have."""
    return PackedWeight(scheme, info, tensors)


class Kept:
    """One checkpoint with a cache; ``reads`` counts how often its weights were read."""

    def __init__(self, model: Path, ops: Any, hook: Any, folder: Path) -> None:
        self.files, self.ops, self.hook, self.reads = resolve(model), ops, hook, 0
        self.cache, self.key = PackedCache(folder), {"model": model.name}

    def weights(self) -> Any:
        self.reads += 1
        return iter_weights(self.files, progress=False)

    def make(self, table: Any) -> Any:
        return create(load_config(self.files), table, torch.float32, BLOCK * BLOCKS, quantized_weights(self.files))

    def load(self) -> torch.Tensor:
        model = load_kept(self.make, self.ops, self.weights, self.cache, self.key, self.hook)
        return logits(model, self.ops, IDS)


def kept(name: str, backend_name: str, tmp_path: Path) -> tuple[Kept, torch.Tensor]:
    model, backend = checkpoint(name, tmp_path / "m"), backend_called(backend_name)
    _, ops = place(model, backend)
    hook = backend.hooks.get("restore_weight", restore)
    return Kept(model, ops, hook, tmp_path / "cache"), logits(load(model, ops), ops, IDS)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "sim"])
@pytest.mark.parametrize("name", [*FAMILIES, *QUANTIZED])
def test_the_same_logits_from_the_cache(name: str, backend: str, tmp_path: Path) -> None:
    one, wanted = kept(name, backend, tmp_path)
    assert torch.equal(one.load(), wanted), "the start that writes the file already uses it"
    assert torch.equal(one.load(), wanted)
    assert one.reads == 1


def test_a_damaged_file_is_packed_anew(tmp_path: Path) -> None:
    one, wanted = kept("llama", "reference", tmp_path)
    one.load()
    path = one.cache.path(one.key)
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    assert torch.equal(one.load(), wanted)
    assert one.reads == 2
    assert torch.equal(one.load(), wanted)
    assert one.reads == 2


def test_a_file_of_another_model_is_packed_anew(tmp_path: Path) -> None:
    """As if the key had missed a difference: the model asks for other weights than were recorded."""
    one, wanted = kept("llama", "reference", tmp_path)
    other, _ = kept("gemma2", "reference", tmp_path / "other")
    other.cache, other.key = one.cache, one.key
    other.load()
    assert torch.equal(one.load(), wanted)
    assert one.reads == 1


def test_a_hook_that_refuses_costs_time_only(tmp_path: Path) -> None:
    one, wanted = kept("llama", "reference", tmp_path)

    def refuse(*_: Any) -> PackedWeight:
        raise ValueError("packed for another instruction set")

    one.hook = refuse
    assert torch.equal(one.load(), wanted)
    assert torch.equal(one.load(), wanted)
    assert one.reads == 2


def test_small_weights_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_BYTES", 1 << 30)
    one, wanted = kept("llama", "reference", tmp_path)
    assert torch.equal(one.load(), wanted)
    assert not one.cache.folder.exists()


def test_an_error_of_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    one, _ = kept("llama", "reference", tmp_path)
    with pytest.raises(ModelError, match="lacks tensors"):
        load_kept(one.make, one.ops, lambda: iter(()), one.cache, one.key, one.hook)
    assert not one.cache.folder.exists()
