"""Mixtures of experts: each expert is rounded by its own tokens, those that saw too few to the nearest, routers not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from qiao.errors import ModelError
from qiao.loading import WeightStore, load_config, read_raw_config, resolve
from qiao.models import read_spec
from qiao.quantize.activations import Layers, linear_names
from qiao.quantize.gptq import gptq
from qiao.quantize.grid import Grid
from qiao.quantize.options import Options
from qiao.quantize.result import stages
from qiao.quantize.scaled import experts_by_awq
from qiao.quantize.source import Source
from safetensors.torch import load_file, save_file

from tests.quantize.test_run import dequantized, run, stored
from tests.support.checkpoints import VOCAB, rand_checkpoint
from tests.support.models import Paged, build, cpu_ops, token_ids
from tests.support.quantized import IDS, backend_called, float_logits, load, logits, place

MANY = [token_ids(48, VOCAB, seed=i) for i in range(12)]
FEW = MANY[:1]
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 2,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 96},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture in bfloat16; the first layer of qwen2-moe has no experts."""
    return rand_checkpoint(tmp_path_factory.mktemp("moe") / "model", dtype="bfloat16", **MODELS[request.param])


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_qiao_serves_what_the_file_means(method: str, model: Path, tmp_path: Path) -> None:
    report = run(model, tmp_path, MANY, method=method)
    assert report.to_nearest == {}, "enough tokens for all"
    held = stored(tmp_path)
    routers = [n for n in held if n.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight", "expert_gate.weight"))]
    assert routers and all(held[name].dtype == torch.bfloat16 for name in routers)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "gate" in str(settings.get("dynamic") or settings.get("modules_to_not_convert"))
    _, ops = place(tmp_path, backend_called("reference"))
    got = logits(load(tmp_path, ops), ops, IDS)
    want = float_logits(load_config(resolve(model)), dequantized(tmp_path), IDS)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


def prepared(model: Path, sequences: list[list[int]]) -> tuple[Source, Layers, list[torch.Tensor]]:
    spec = read_spec(read_raw_config(resolve(model)))
    source = Source(WeightStore(resolve(model)), spec)
    layers = Layers(spec, cpu_ops(), torch.float32, 8, 48)
    return source, layers, layers.embed(source.embedding(torch.float32), sequences)


def inputs_of(model: Path, sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers' second layer feeds its experts [T, E], and which of them it chooses [T, A]."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []
    block = whole.model.layers[1].mlp
    block.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(0, 1)))
    with torch.no_grad():
        for ids in sequences:
            whole(torch.tensor([ids]), use_cache=False)
    x = torch.cat(seen)
    chosen = torch.softmax(x @ block.gate.weight.float().T, -1).topk(whole.config.num_experts_per_tok).indices
    return x, chosen


def test_each_expert_hears_its_own_tokens(model: Path) -> None:
    x, chosen = inputs_of(model, MANY)
    source, layers, hidden = prepared(model, MANY)
    with torch.inference_mode():
        made = [layers.make(i, source.inner(i, source.layer(i, torch.float32))) for i in range(2)]
        layers.run(0, made[0], hidden)
        stacks = source.linears(1, linear_names(made[1]))
        heard = layers.listen(1, made[1], hidden, [s.name for s in stacks if s.name.endswith("gate_up_proj")])
    experts = int(chosen.max()) + 1
    assert experts >= 3
    for i in range(experts):
        own = x[(chosen == i).any(1)]
        found = heard[f"model.layers.1.mlp.experts.{i}.gate_up_proj"]
        assert found.count == len(own)
        torch.testing.assert_close(found.gram, own.T @ own / len(own), atol=2e-4, rtol=2e-4)


def test_gptq_takes_the_hessian_of_each_expert(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that come out are those of the expert's own sums, which differ from its neighbour's."""
    seen: list[torch.Tensor] = []

    def spy(weight: torch.Tensor, gram: torch.Tensor, *rest: Any, **more: Any) -> Any:
        seen.append(gram)
        return gptq(weight, gram, *rest, **more)

    monkeypatch.setattr("qiao.quantize.methods.gptq", spy)
    report = run(model, tmp_path, MANY, method="gptq")
    names = [name for row in report.errors for name in row["linears"]]
    assert len(seen) == len(names)
    firsts = [g for n, g in zip(names, seen, strict=True) if ".experts." in n and n.endswith("gate_up_proj")]
    assert not torch.allclose(firsts[0], firsts[1], rtol=0.05)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_that_saw_too_few_tokens_are_rounded_to_nearest(
    method: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    symmetric = {"symmetric": True} if method == "gptq" else {}
    with caplog.at_level(logging.WARNING, "qiao.quantize.run"):
        report = run(model, tmp_path / "few", FEW, method=method, **symmetric)
    gate_ups = {name: count for name, count in report.to_nearest.items() if name.endswith("gate_up_proj")}
    assert gate_ups and all(count < 64 for count in gate_ups.values())
    assert "fewer tokens than they have inputs" in caplog.text and next(iter(gate_ups)) in caplog.text
    assert not any("shared" in name or "self_attn" in name for name in report.to_nearest)
    if method == "gptq":  # awq's file has the norm's scale in the same weights
        run(model, tmp_path / "rtn", method="rtn", symmetric=True)
        few, plain = dequantized(tmp_path / "few"), dequantized(tmp_path / "rtn")
        name = next(iter(gate_ups)).replace("gate_up_proj", "gate_proj.weight")
        name = name if name in few else name.replace("mlp", "block_sparse_moe").replace("gate_proj", "w1")
        assert torch.equal(few[name], plain[name])


def test_awq_changes_nothing_but_by_rounding(model: Path, scaled_weights: dict[str, torch.Tensor]) -> None:
    """With large scales, the weights that are about to be rounded still make the model that they come from."""
    made = scaled_weights
    source, layers, hidden = prepared(model, MANY)
    options, grid = Options(method="awq", group=32), Grid(4, False, torch.float32)
    config = read_raw_config(resolve(model))
    weights = {name: x.float() for name, x in load_file(model / "model.safetensors").items()}
    with torch.inference_mode():
        layer = layers.make(1, source.inner(1, tensors := source.layer(1, torch.float32)))
        layers.run(0, layers.make(0, source.inner(0, source.layer(0, torch.float32))), hidden)
        stacks = source.linears(1, linear_names(layer))
        norms = {entry.inner: entry for entry in source.layers[1]}

        def listen(names: Any) -> Any:
            return layers.listen(1, layer, hidden, names)

        result = experts_by_awq(stacks, norms, tensors, options, grid, listen, source.spec, 1)
        made.update(result.changed)
        ids = token_ids(40, VOCAB, seed=99)
        want = Paged(build(config, weights.items())).feed(ids)
        got = Paged(build(config, {**weights, **made}.items())).feed(ids)
    assert set(result.rounded) == {entry.name for entry in source.layers[1] if entry.linear}
    moved = {n: float((weights[n] - x).norm() / weights[n].norm()) for n, x in made.items() if x.dim() == 2}
    assert min(moved.values()) > 0.05, moved
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


def test_sums_of_many_experts_are_gathered_in_parts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, layers, _ = prepared(model, FEW)
    layer = layers.make(1, source.inner(1, source.layer(1, torch.float32)))
    stacks = source.linears(1, linear_names(layer))
    whole = stages(stacks)
    assert len(whole) == 4 and sum(map(len, whole)) == len(stacks)
    monkeypatch.setattr("qiao.quantize.result.GRAMS", 4 * 64 * 64 * 2)
    cut = stages(stacks)
    assert max(map(len, cut[2:])) <= 8 and len(cut) > 4
    assert [s.name for stage in cut for s in stage] == [s.name for stage in whole for s in stage]


def test_all_experts_in_one_tensor_are_refused_by_name(tmp_path: Path) -> None:
    folder = rand_checkpoint(tmp_path / "model", **MODELS["mixtral"])
    held = load_file(folder / "model.safetensors") | {"model.layers.0.mlp.experts.down_proj": torch.zeros(3, 64, 96)}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.down_proj holds all experts.*save_pretrained"):
        Source(WeightStore(resolve(folder)), read_spec(read_raw_config(resolve(folder))))
