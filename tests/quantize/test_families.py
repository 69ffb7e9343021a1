"""Every dense family: scales move between layers without a change of the model, and rows find back to their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from qiao.errors import ModelError
from qiao.loading import WeightStore, read_raw_config, resolve
from qiao.models import read_spec
from qiao.quantize.activations import Layers, linear_names
from qiao.quantize.grid import Grid
from qiao.quantize.methods import by_rtn
from qiao.quantize.options import Options
from qiao.quantize.scaled import by_awq
from qiao.quantize.source import Source
from safetensors.torch import save_file

from tests.models import published
from tests.models.families import FAMILIES, config_of
from tests.models.test_published import CASES
from tests.support.models import Paged, build, cpu_ops, reference_model, token_ids

DENSE = [name for name in FAMILIES if "moe" not in name and "mixtral" not in name]


def checkpoint(name: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A random model of a family in ``folder``: its config and weights."""
    if name in CASES:
        config, _, shapes = CASES[name]
        weights = published.random_weights(shapes(config))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    else:
        made = config_of(name)
        reference = reference_model(made)
        weights = dict(reference.state_dict())
        if made.tie_word_embeddings:
            del weights["lm_head.weight"]
        made.architectures = [type(reference).__name__]
        made.save_pretrained(folder)
        config = read_raw_config(resolve(folder))
    save_file({n: w.float().contiguous() for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return config, weights


def prepared(name: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor], Source, Layers, list[torch.Tensor]]:
    """Config and weights, what a run has before its first layer, and the hidden states of two sequences."""
    config, weights = checkpoint(name, folder)
    spec = read_spec(config)
    source = Source(WeightStore(resolve(folder)), spec)
    layers = Layers(spec, cpu_ops(), torch.float32, 8, 48)
    hidden = layers.embed(source.embedding(torch.float32), [token_ids(48, 128), token_ids(31, 128, seed=2)])
    return config, weights, source, layers, hidden


@pytest.mark.parametrize("name", [*DENSE, *CASES])
def test_awq_changes_nothing_but_by_rounding(
    name: str, tmp_path: Path, scaled_weights: dict[str, torch.Tensor]
) -> None:
    """With large scales, the weights that are about to be rounded still make the model that they come from."""
    made = scaled_weights
    config, weights, source, layers, hidden = prepared(name, tmp_path / "model")
    options, grid = Options(method="awq", group=32), Grid(4, False, torch.float32)
    with torch.inference_mode():
        for index, entries in enumerate(source.layers):
            tensors = source.layer(index, torch.float32)
            layer = layers.make(index, source.inner(index, tensors))
            stacks = source.linears(index, linear_names(layer))
            statistics = layers.listen(index, layer, hidden, [stack.name for stack in stacks])
            layers.run(index, layer, hidden)
            norms = {entry.inner: entry for entry in entries}
            result = by_awq(stacks, norms, tensors, options, grid, statistics, source.spec, index)
            assert set(result.rounded) == {entry.name for entry in entries if len(entry.shape) == 2}
            made.update(result.changed)
        ids = token_ids(40, 128, seed=3)
        want = Paged(build(config, weights.items())).feed(ids)
        got = Paged(build(config, {**weights, **made}.items())).feed(ids)
    assert all(not torch.equal(weights[n], x) for n, x in made.items() if "norm" in n), "norms must have taken scales"
    moved = [float((weights[n] - x).norm() / weights[n].norm()) for n, x in made.items() if x.dim() == 2]
    assert min(moved) > 0.05, "so must all matrices"
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["internlm2", "chatglm3", "baichuan2", "phi3", "qwen3", "gemma3"])
def test_rows_find_back_to_their_tensors(name: str, tmp_path: Path) -> None:
    """Rounding each row by itself must not depend on the order in which rows are stacked."""
    _, weights, source, layers, _ = prepared(name, tmp_path / "model")
    with torch.inference_mode():
        tensors = source.layer(1, torch.float32)
        stacks = source.linears(1, linear_names(layers.make(1, source.inner(1, tensors))))
        result = by_rtn(stacks, tensors, Options(method="rtn", bits=8, group=32), Grid(8, False, torch.float32))
    assert len(stacks) == 4
    for entry in (entry for entry in source.layers[1] if len(entry.shape) == 2):
        want = weights[entry.name].float()
        torch.testing.assert_close(result.rounded[entry.name].values(), want, atol=float(want.abs().max()) / 60, rtol=0)


def test_tensors_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    config, _ = checkpoint("gemma3", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    held = load_file(file) | {"vision_tower.patch.weight": torch.zeros(4, 4)}
    save_file(held, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"vision_tower\.patch\.weight.*only that is quantized"):
        Source(WeightStore(resolve(tmp_path / "model")), read_spec(config))


def test_an_architecture_without_a_definition_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no definition of its own here"):
        read_spec({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
