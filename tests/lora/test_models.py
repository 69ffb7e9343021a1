"""Logits with an adapter against transformers on merged weights, by family, by quantized base, and against peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from qiao.errors import ModelError
from qiao.loading import iter_weights, load_config, quantized_weights, resolve
from qiao.loading.lora import LoraFile, LoraModule, read_adapter
from qiao.models import create, describe
from qiao.models.adapters import ModelAdapters, with_adapters
from qiao.models.base import Model
from qiao.registry import FallbackCounters, Policy, bind, make_plan
from safetensors.torch import load_file

from tests.models import published
from tests.models.test_published import INTERNLM2
from tests.quantization.test_checkpoints import CASES, float_config
from tests.support.adapters import LINEARS, linear_modules, merge, write_adapter
from tests.support.checkpoints import rand_checkpoint
from tests.support.models import Paged, build, cpu_ops
from tests.support.quantized import BACKENDS, BLOCK, BLOCKS, IDS, backend_called, float_logits, logits
from tests.support.quantizers import quantized_checkpoint

NEAR = {"atol": 2e-3, "rtol": 2e-3}
TINY = {
    **{"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 9, "intermediate_size": 8},
    "max_position_embeddings": 16,
}
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama-biases": ({"attention_bias": True, "mlp_bias": True}, LINEARS),
    "qwen2-tied": ({"model_type": "qwen2", "tie_word_embeddings": True}, LINEARS),
    "qwen3": ({"model_type": "qwen3", "head_dim": 16}, LINEARS),
    "phi3": ({"model_type": "phi3"}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "gemma2": ({"model_type": "gemma2", "head_dim": 16}, LINEARS),
    "glm": ({"model_type": "glm", "head_dim": 16}, (*LINEARS, "gate_up_proj")),
    "mixtral": ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, LINEARS[:4]),
}


def adapted(model: Path, backend: str, adapter: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] of ``IDS`` with the adapter, and without it while it is loaded."""
    files = resolve(model)
    quantized = quantized_weights(files)
    shape = with_adapters(describe(load_config(files), quantized), 2, 8)
    plan = make_plan(shape, backend_called(backend), Policy.parse("allow"), block_size=BLOCK)
    ops = bind(plan, backend_called(backend), FallbackCounters())
    made = create(load_config(files), ops, torch.float32, BLOCK * BLOCKS, quantized)
    made.load(iter_weights(files, progress=False))
    adapters = ModelAdapters(made, ops)
    adapters.load(7, read_adapter(str(adapter), 8))
    plain = logits(made, ops, IDS)
    adapters.choose([7], [len(IDS)])
    return logits(made, ops, IDS), plain


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    changes, targets = FAMILIES[family]
    base = rand_checkpoint(tmp_path / "base", **changes)
    adapter = write_adapter(tmp_path / "adapter", linear_modules(base, targets), size=0.2)
    found, plain = adapted(base, "reference", adapter)
    config = load_config(resolve(base))
    merged = merge(base, adapter, tmp_path / "merged")
    torch.testing.assert_close(found, float_logits(config, load_file(merged / "model.safetensors"), IDS), **NEAR)
    torch.testing.assert_close(plain, float_logits(config, load_file(base / "model.safetensors"), IDS), **NEAR)
    assert (found - plain).abs().max() > 0.05


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["gptq-act-order", "w8a16-asym"])
def test_quantized_bases(case: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QIAO_CPU_INT8_ACTIVATIONS", "0")
    folder, values = quantized_checkpoint(tmp_path / "q", *CASES[case])
    modules = {n.removesuffix(".weight"): tuple(v.shape) for n, v in values.items() if n.split(".")[-2] in LINEARS}
    adapter = write_adapter(tmp_path / "adapter", modules, size=0.2)
    found, _ = adapted(folder, backend, adapter)
    update = read_adapter(str(adapter), 8)
    merged = {name: value.double() for name, value in values.items()}
    for name, module in update.modules.items():
        merged[f"{name}.weight"] += module.b.double() @ module.a.double()
    wanted = float_logits(float_config(folder), {n: v.float() for n, v in merged.items()}, IDS)
    torch.testing.assert_close(found, wanted, **NEAR)


def test_a_stored_tensor_that_is_taken_apart(tmp_path: Path) -> None:
    """InternLM2 stores queries, keys and values as one tensor in another order of rows."""
    weights = published.random_weights(published.internlm2_weights(INTERNLM2))
    generator = torch.Generator().manual_seed(5)
    modules, merged = {}, dict(weights)
    for name, weight in weights.items():
        if weight.dim() != 2 or not name.startswith("model.layers"):
            continue
        a, b = (torch.randn(s, generator=generator) * 0.1 for s in ((3, weight.shape[1]), (weight.shape[0], 3)))
        modules[name.removesuffix(".weight")] = LoraModule(a, b, ("a", "b"))
        merged[name] = weight + b @ a
    model, ops = build(INTERNLM2, weights.items()), cpu_ops()
    adapters = ModelAdapters(model, ops)
    adapters.load(1, LoraFile("there", modules, b""))
    ids = [i % 32 for i in range(20)]
    adapters.choose([1], [len(ids)])
    torch.testing.assert_close(
        Paged(model).feed(ids), published.internlm2(INTERNLM2, merged, ids).float(), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_itself(rslora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = rand_checkpoint(tmp_path / "base")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=r".*layers\.\d\.(self_attn\.(q|k|o)_proj|mlp\.down_proj)" if rslora else "all-linear",
        rank_pattern={"o_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 3},
        use_rslora=rslora,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0]
    found, plain = adapted(base, "reference", tmp_path / "adapter")
    torch.testing.assert_close(found, wanted, **NEAR)
    assert (found - plain).abs().max() > 0.05


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            {"model.layers.0.self_attn.q_proj": (64, 48)},
            r"q_proj.lora_A.weight is \[4, 48\].*64 columns.*another model",
        ),
        ({"model.layers.0.mlp.up_proj": (96, 64)}, r"up_proj.lora_B.weight is \[96, 4\].*128 rows"),
        ({"model.layers.9.mlp.up_proj": (128, 64)}, "layers.9.mlp.up_proj.lora_A.weight belongs to no linear layer"),
        ({"lm_head": (320, 64)}, "lm_head.lora_A.weight adapts the embedding or the head"),
    ],
)
def test_what_does_not_fit_names_the_tensor(
    modules: dict[str, tuple[int, int]], message: str, tmp_path: Path, small: tuple[Model, ModelAdapters]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", {"model.layers.1.mlp.down_proj": (64, 128), **modules})
    model, adapters = small
    with pytest.raises(ModelError, match=message):
        adapters.load(1, read_adapter(str(adapter), 8))
    assert all(linear._adapters is not None and not linear._adapters.nbytes(1) for linear in model.linears())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, ModelAdapters]:
    base = rand_checkpoint(tmp_path_factory.mktemp("small") / "base")
    files = resolve(base)
    model = build(load_config(files), iter_weights(files, progress=False))
    return model, ModelAdapters(model, cpu_ops())


def test_the_generic_definition_takes_no_adapters() -> None:
    class Other:
        shape = describe({"architectures": ["LlamaForCausalLM"], **TINY})

    with pytest.raises(ModelError, match="no definition of its own"):
        ModelAdapters(Other(), cpu_ops())  # type: ignore[arg-type]
