"""Files that are no adapter for us: the error names the tensor or the setting, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qiao import EngineArgs, ModelError, ParameterError
from qiao.loading.lora import read_adapter
from qiao.lora.request import LoRARequest, parse_modules
from safetensors.torch import load_file, save_file

from tests.support.adapters import write_adapter

Q = "model.layers.0.self_attn.q_proj"
MODULES = {Q: (8, 6), "model.layers.0.mlp.down_proj": (6, 16)}
A = f"base_model.model.{Q}.lora_A.weight"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", MODULES)


def configure(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"use_dora": True}, "use_dora.*DoRA is not supported; train with use_dora=False"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]: whole modules are not supported"),
        ({"bias": "all"}, "bias is 'all': trained biases are not supported"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'.*convert the adapter"),
        ({"r": 0}, "r must be an integer of at least 1, got 0"),
        ({"lora_alpha": "much"}, "lora_alpha must be a number, got 'much'"),
        ({"target_modules": ["v_proj", "down_proj"]}, "q_proj.lora_A.weight belongs to none of the target_modules"),
        ({"target_modules": "(" + "x"}, "target_modules holds .* not a regular expression"),
        ({"target_modules": None}, "target_modules must be a text or a list"),
        ({"rank_pattern": {"q_proj": 5}}, r"q_proj.lora_A.weight \[4, 6\].*not of the rank 5"),
        ({"alpha_pattern": {"q_proj": True}}, "alpha_pattern must be a number"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
    ],
)
def test_settings(changes: dict[str, Any], message: str, adapter: Path) -> None:
    configure(adapter, **changes)
    with pytest.raises(ModelError, match=message):
        read_adapter(str(adapter), 8)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(A), "q_proj.lora_B.weight has no lora_A beside it"),
        (put(f"base_model.model.{Q}.lora_magnitude_vector", torch.ones(8)), "lora_magnitude_vector: DoRA"),
        (put("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 9)), "adapters of embeddings"),
        (put("base_model.model.lm_head.modules_to_save.weight", torch.ones(4, 9)), "lm_head.*whole modules"),
        (put("model.norm.weight", torch.ones(4)), "model.norm.weight: is not a LoRA weight"),
        (put(A, torch.full((4, 6), float("nan"))), "q_proj.lora_A.weight holds NaN"),
        (put(A, torch.ones(4, 6, dtype=torch.int64)), "q_proj.lora_A.weight is int64"),
        (put(A, torch.ones(6)), r"q_proj.lora_A.weight is float32 \[6\], expected a floating point matrix"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)
def test_tensors(change: Callable[[dict[str, torch.Tensor]], None], message: str, adapter: Path) -> None:
    rewrite(adapter, change)
    with pytest.raises(ModelError, match=message):
        read_adapter(str(adapter), 8)


def test_folders(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="rank 4, and --max-lora-rank is 2; start with --max-lora-rank 4"):
        read_adapter(str(adapter), 2)
    (adapter / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes()[:-9])
    with pytest.raises(ModelError, match="truncated"):
        read_adapter(str(adapter), 8)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickle file"):
        read_adapter(str(adapter), 8)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"adapter_config.json: not found"):
        read_adapter(str(adapter), 8)
    with pytest.raises(ModelError, match="no such folder"):
        read_adapter(str(tmp_path / "nowhere"), 8)


@pytest.mark.parametrize("path", ["a" * 5000, "~nobody-has-this-name/x"])
def test_a_path_that_no_folder_can_have(path: str) -> None:
    with pytest.raises(ModelError, match="cannot be the name of a folder"):
        read_adapter(path, 8)


@pytest.mark.parametrize(
    "style",
    [
        "base_model.model.{module}.lora_{side}.weight",
        "base_model.model.{module}.lora_{side}.mine.weight",
        "{module}.lora_{side}.weight",
    ],
)
def test_names_of_every_generation(style: str, tmp_path: Path) -> None:
    found = read_adapter(str(write_adapter(tmp_path / "a", MODULES, style=style, dtype=torch.bfloat16)), 8)
    assert set(found.modules) == set(MODULES)
    assert found.rank == 4
    assert found.modules[Q].b.dtype == torch.float32


def test_the_digest_is_of_weights_and_settings(tmp_path: Path) -> None:
    one, other, scaled = (
        read_adapter(str(write_adapter(tmp_path / str(i), MODULES, seed=seed, lora_alpha=alpha)), 8).digest
        for i, (seed, alpha) in enumerate([(1, 8), (2, 8), (1, 9)])
    )
    same = read_adapter(str(write_adapter(tmp_path / "same", MODULES, seed=1, lora_alpha=8)), 8).digest
    assert same == one
    assert len({one, other, scaled}) == 3


def test_modules_of_the_command_line() -> None:
    given = ["a=/x/y=z", '{"name": "b", "path": "org/b", "base_model_name": "M"}']
    assert parse_modules(given) == [LoRARequest("a", 1, "/x/y=z"), LoRARequest("b", 2, "org/b", "M")]
    for wrong in (
        "a",
        "=x",
        "a=",
        '{"name": "b"}',
        "{",
        '{"name": "b", "path": "p", "rank": 3}',
        '{"name": 1, "path": "p"}',
    ):
        with pytest.raises(ParameterError, match="lora_modules"):
            parse_modules([wrong])
    with pytest.raises(ParameterError, match="'a' twice"):
        parse_modules(["a=x", "a=y"])
    with pytest.raises(ParameterError, match="needs enable_lora"):
        EngineArgs(model="m", lora_modules=("a=x",))
    with pytest.raises(ParameterError, match="name of the model itself"):
        EngineArgs(model="m", enable_lora=True, lora_modules=("m=x",))
    for wrong in ({"lora_int_id": 0}, {"lora_name": ""}, {"lora_path": ""}):
        with pytest.raises(ParameterError, match=next(iter(wrong))):
            LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "p", **wrong})
