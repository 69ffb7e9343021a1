"""Quantized checkpoints of all formats compute what a float model of the values by the format's definition computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qiao.cli.plan import read_shape
from qiao.config import EngineArgs
from qiao.errors import ParameterError
from qiao.loading import iter_weights, load_config, quantized_weights, resolve
from qiao.models import describe

from tests.support.fallback import host_backend, sim_backend
from tests.support.quantized import BACKENDS, IDS, backend_called, float_logits, load, logits, place
from tests.support.quantizers import (
    Writer,
    awq,
    bitsandbytes,
    bitsandbytes_int8,
    compressed,
    fp8,
    gptq,
    quantized_checkpoint,
)


def gptq_settings(bits: int = 4, group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, "desc_act": False, **more}


def awq_settings(group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **more}


def compressed_settings(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, **more.pop("group", {})}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more}


def renamed(writer: Writer, scale: str) -> Writer:
    """Its ``weight_scale_inv`` under another name."""

    def write(*args: Any) -> Any:
        parts, value = writer(*args)
        return {"weight": parts["weight"], scale: parts["weight_scale_inv"]}, value

    return write


def with_input_scale(writer: Writer) -> Writer:
    """A scale of activations beside each weight, which weight-only FP8 has no use for."""

    def write(*args: Any) -> Any:
        parts, value = writer(*args)
        return parts | {"input_scale": torch.tensor(0.01)}, value

    return write


EIGHT_BIT_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
STATIC_INPUTS = {**EIGHT_BIT_INPUTS, "dynamic": False, "strategy": "tensor"}
BY_GROUP = {"num_bits": 4, "strategy": "group", "group_size": 32}
FOUR_BIT = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

CASES: dict[str, tuple[Writer, dict[str, Any]]] = {
    "gptq-4": (gptq(), gptq_settings()),
    "gptq-4-sym": (gptq(symmetric=True), gptq_settings(sym=True)),
    "gptq-2": (gptq(2), gptq_settings(2)),
    "gptq-3": (gptq(3), gptq_settings(3)),
    "gptq-8": (gptq(8), gptq_settings(8)),
    "gptq-8-sym": (gptq(8, symmetric=True), gptq_settings(8, sym=True)),
    "gptq-v2": (gptq(second=True), gptq_settings(checkpoint_format="gptq_v2")),
    "gptq-64": (gptq(group=64), gptq_settings(group=64)),
    "gptq-128": (gptq(group=128), gptq_settings(group=128)),
    "gptq-channel": (gptq(group=-1), gptq_settings(group=-1)),
    "gptq-channel-act-order": (gptq(group=-1, act_order=True), gptq_settings(group=-1, desc_act=True)),
    "gptq-act-order": (gptq(act_order=True), gptq_settings(desc_act=True)),
    "gptq-8-act-order": (gptq(8, act_order=True), gptq_settings(8, desc_act=True)),
    "gptq-no-g-idx": (gptq(g_idx=False), gptq_settings()),
    "gptq-short-group": (gptq(group=48), gptq_settings(group=48)),
    "awq-gemm": (awq(), awq_settings()),
    "awq-gemv": (awq(gemv=True), awq_settings(version="gemv")),
    "awq-channel": (awq(group=-1), awq_settings(-1)),
    "awq-zeros-of-0": (awq(zeros=lambda z: z * (z > 7)), awq_settings()),
    "w4a16-group": (compressed(4, 32, packed=True), compressed_settings(BY_GROUP, format="pack-quantized")),
    "w4a16-asym": (
        compressed(4, 32, packed=True, symmetric=False),
        compressed_settings({**BY_GROUP, "symmetric": False}, format="pack-quantized"),
    ),
    "w4a16-act-order": (
        compressed(4, 32, packed=True, act_order=True),
        compressed_settings({**BY_GROUP, "actorder": "group"}, format="pack-quantized"),
    ),
    "w4a16-channel": (
        compressed(4, packed=True),
        compressed_settings({"num_bits": 4, "strategy": "channel"}, format="pack-quantized"),
    ),
    "w8a16-packed": (
        compressed(8, 16, packed=True),
        compressed_settings({"num_bits": 8, "strategy": "group", "group_size": 16}, format="pack-quantized"),
    ),
    "w8a16-channel": (
        compressed(8),
        compressed_settings({"num_bits": 8, "strategy": "channel"}, format="int-quantized"),
    ),
    "w8a16-asym": (
        compressed(8, symmetric=False),
        compressed_settings({"num_bits": 8, "strategy": "channel", "symmetric": False}, format="int-quantized"),
    ),
    "w8a16-tensor": (
        compressed(8, one_scale=True),
        compressed_settings({"num_bits": 8, "strategy": "tensor"}, format="int-quantized"),
    ),
    "fp8-tensor": (fp8(), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8-channel": (fp8(True), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8-blocks": (fp8(block=(48, 32)), {"quant_method": "fp8", "weight_block_size": [48, 32]}),
    "fp8-compressed": (
        fp8(True),
        compressed_settings({"num_bits": 8, "type": "float", "strategy": "channel"}, format="float-quantized"),
    ),
    "fp8-compressed-blocks": (
        renamed(fp8(block=(48, 32)), "weight_scale"),
        compressed_settings(
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 32]}, format="float-quantized"
        ),
    ),
    "fp8-fbgemm": (fp8(True), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "fp8-modelopt": (
        with_input_scale(fp8()),
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": None, "ignore": ["lm_head"]},
    ),
    "nf4": (bitsandbytes(), FOUR_BIT),
    "nf4-nested": (bitsandbytes(nested=True, block=128), FOUR_BIT),
    "nf4-stored-as-bfloat16": (bitsandbytes(stored=torch.bfloat16), FOUR_BIT),
    "llm-int8": (bitsandbytes_int8(), {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
ROUNDED = {
    "w8a8-dynamic": (
        compressed(8),
        compressed_settings(
            {"num_bits": 8, "strategy": "channel"},
            format="int-quantized",
            group={"input_activations": EIGHT_BIT_INPUTS},
        ),
    ),
    "w8a8-static": (
        compressed(8, one_scale=True, static=True),
        compressed_settings(
            {"num_bits": 8, "strategy": "tensor"},
            format="int-quantized",
            group={"input_activations": STATIC_INPUTS},
        ),
    ),
}
SCHEMES = {
    "gptq-8": "w8a16",
    "gptq-8-sym": "w8a16",
    "gptq-8-act-order": "w8a16",
    "fp8-blocks": "dense",
    "fp8-compressed-blocks": "dense",
    "llm-int8": "w8a16",
}


def scheme(case: str) -> str:
    if case.startswith("nf4"):
        return "dense"
    return SCHEMES.get(case) or next((s for s in ("w8a16", "fp8", "w8a8") if case.startswith(s)), "w4a16")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_logits(case, backend, tmp_path):
    folder, values = quantized_checkpoint(tmp_path / "q", *CASES[case], attention_bias=True)
    wanted = float_logits(float_config(folder), values, IDS)
    plan, ops = place(folder, backend_called(backend))
    assert set(plan.shape.schemes) == {scheme(case), "dense"}
    torch.testing.assert_close(logits(load(folder, ops), ops, IDS), wanted, atol=1e-3, rtol=1e-3)


ODD = {"hidden_size": 66, "intermediate_size": 101, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["w8a16-asym", "w4a16-asym", "w4a16-act-order", "fp8-channel", "nf4-nested"])
def test_odd_inputs_and_outputs(case, backend, tmp_path):
    """With short last groups where there are groups."""
    folder, values = quantized_checkpoint(tmp_path / "q", *CASES[case], **ODD)
    wanted = float_logits(float_config(folder), values, IDS)
    _, ops = place(folder, backend_called(backend))
    torch.testing.assert_close(logits(load(folder, ops), ops, IDS), wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_with_rounded_activations(backend, tmp_path):
    folder, values = quantized_checkpoint(tmp_path / "q", *ROUNDED["w8a8-dynamic"])
    wanted = float_logits(float_config(folder), values, IDS)
    plan, ops = place(folder, backend_called(backend))
    assert set(plan.shape.schemes) == {"w8a8", "dense"}
    found = logits(load(folder, ops), ops, IDS)
    # the least of the cases, 0.9925 for awq-gemm, is what the same rounding in torch gives
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=-1).min() > 0.99


STEP = 0.02
"""``input_scale`` of ``compressed(static=True)``."""


def by_static_step(x):
    """What compressed-tensors' ``fake_quantize`` makes of inputs with a static scale."""
    return (torch.clamp(torch.round(x.double() / STEP), -128, 127) * STEP).float()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_static_scales_round_the_inputs(backend, dtype, tmp_path):
    folder, values = quantized_checkpoint(tmp_path / "q", *ROUNDED["w8a8-static"])
    _, ops = place(folder, backend_called(backend))
    down = load(folder, ops, dtype)._layers[0]._mlp.down
    x = (torch.randn(9, down.in_features, generator=torch.Generator().manual_seed(1)) * 1.5).to(dtype)
    rounded = by_static_step(x.float())
    assert {-128 * STEP, 127 * STEP} <= {round(v, 4) for v in rounded.flatten().tolist()}, "both ends are reached"
    wanted = rounded.double() @ values["model.layers.0.mlp.down_proj.weight"].double().T
    found = down(x.to(ops.device)).cpu()
    assert found.dtype == dtype
    bound = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=bound)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_with_static_scales(backend, tmp_path):
    folder, values = quantized_checkpoint(tmp_path / "q", *ROUNDED["w8a8-static"])
    wanted = float_logits(float_config(folder), values, IDS, by_static_step)
    _, ops = place(folder, backend_called(backend))
    found = logits(load(folder, ops), ops, IDS)
    # a sum that ends a hair away may round to the next step, so a few logits are further off
    assert (found - wanted).abs().quantile(0.9) < 1e-3
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=-1).min() > 0.9999
    plain = float_logits(float_config(folder), values, IDS)
    assert (found - plain).abs().median() > 1e-2, "rounding must be seen"


def test_static_scales_that_differ_keep_parts_apart(tmp_path):
    def own(module, shape, random):
        parts, value = compressed(8, one_scale=True, static=True)(module, shape, random)
        return parts | ({"input_scale": torch.tensor(0.03)} if "k_proj" in module else {}), value

    folder, _ = quantized_checkpoint(tmp_path / "q", own, ROUNDED["w8a8-static"][1])
    _, ops = place(folder, host_backend())
    layer = load(folder, ops)._layers[0]
    assert len(layer._attention.qkv._apart) == 3
    assert layer._mlp.gate_up._weight is not None


def float_config(folder):
    config = load_config(resolve(folder))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_runs(dtype, tmp_path):
    folder, values = quantized_checkpoint(tmp_path / "q", *CASES["gptq-4-sym"], dtype="float16")
    values = {name: value.float() for name, value in values.items()}
    wanted = float_logits(float_config(folder), values, IDS)
    assert describe(load_config(resolve(folder)), quantized_weights(resolve(folder))).dtype == "float16"
    _, ops = place(folder, host_backend())
    found = logits(load(folder, ops, dtype), ops, IDS, dtype)
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=-1).min() > 0.99


MOE = {"model_type": "qwen2_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("case", ["gptq-act-order", "awq-gemm", "w8a16-channel", "fp8-tensor"])
def test_experts(case, tmp_path):
    options = {**MOE, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}
    linear = r"(experts\.\d+|self_attn)\.\w+_proj"
    folder, values = quantized_checkpoint(tmp_path / "q", *CASES[case], linear, **options)
    wanted = float_logits(float_config(folder), values, IDS)
    plan, ops = place(folder, host_backend())
    assert scheme(case) in {line.scheme for line in plan.shape.linears if line.rows == "X"}
    torch.testing.assert_close(logits(load(folder, ops), ops, IDS), wanted, atol=1e-3, rtol=1e-3)


def test_parts_of_one_weight_with_other_permutations_stay_apart(tmp_path):
    folder, _ = quantized_checkpoint(tmp_path / "q", *CASES["gptq-act-order"])
    _, ops = place(folder, host_backend())
    layer = load(folder, ops)._layers[0]
    assert len(layer._attention.qkv._apart) == 3
    assert len(layer._mlp.gate_up._apart) == 2
    assert layer._mlp.down._weight is not None


def test_a_quantized_head(tmp_path):
    folder, values = quantized_checkpoint(
        tmp_path / "q", gptq(), gptq_settings(lm_head=True), r"lm_head|(q|k|v|o|gate|up|down)_proj"
    )
    wanted = float_logits(float_config(folder), values, IDS)
    plan, ops = place(folder, host_backend())
    assert plan.shape.schemes == ("w4a16",)
    torch.testing.assert_close(logits(load(folder, ops), ops, IDS), wanted, atol=1e-3, rtol=1e-3)


def test_a_device_without_the_scheme(tmp_path):
    folder, values = quantized_checkpoint(tmp_path / "q", *CASES["gptq-act-order"], attention_bias=True)
    wanted = float_logits(float_config(folder), values, IDS)
    plan, ops = place(folder, sim_backend(chip="dense"))
    assert plan.moved("W[w4a16]")
    torch.testing.assert_close(logits(load(folder, ops), ops, IDS), wanted, atol=1e-3, rtol=1e-3)


def test_dequantized_at_load(tmp_path):
    folder, values = quantized_checkpoint(tmp_path / "q", *CASES["gptq-act-order"])
    found = dict(iter_weights(resolve(folder), progress=False, dequantize=True))
    assert found.keys() == values.keys()
    for name, value in values.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "sim"])
def test_four_bits_take_less_than_30_percent_of_16(backend, tmp_path):
    settings = gptq_settings(group=128)
    folder, values = quantized_checkpoint(
        tmp_path / "q", gptq(group=128), settings, hidden_size=256, intermediate_size=256, num_hidden_layers=1
    )
    _, ops = place(folder, backend_called(backend))
    layer = load(folder, ops)._layers[0]
    linears = (layer._attention.qkv, layer._attention.out, layer._mlp.gate_up, layer._mlp.down)
    taken = sum(linear._weight.nbytes for linear in linears)
    assert taken <= 0.3 * sum(2 * value.numel() for name, value in values.items() if "_proj" in name)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the native plugin is not installed")
@pytest.mark.parametrize("case", ["gptq-4-sym", "gptq-act-order", "awq-gemm", "w8a16-packed", "w8a16-asym"])
def test_rounded_activations_stay_near(case, tmp_path, monkeypatch):
    """As the native plugin runs unless told not to: a device may round activations of weight-only products."""
    monkeypatch.setenv("QIAO_CPU_INT8_ACTIVATIONS", "1")
    folder, values = quantized_checkpoint(tmp_path / "q", *CASES[case])
    wanted = float_logits(float_config(folder), values, IDS)
    _, ops = place(folder, backend_called("cpu"))
    found = logits(load(folder, ops), ops, IDS)
    # the least of the cases, 0.9925 for awq-gemm, is what the same rounding in torch gives
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=-1).min() > 0.99


@pytest.mark.parametrize("case", CASES)
def test_a_config_alone_is_planned_as_its_folder(case, tmp_path):
    """Where all layers are quantized, what the plan assumes of a config and what headers say is the same."""
    folder, _ = quantized_checkpoint(tmp_path / "q", *CASES[case])
    whole, assumption = read_shape(EngineArgs(model=str(folder)))
    assert assumption == "" and scheme(case) in whole.schemes
    alone, assumption = read_shape(EngineArgs(model=str(folder / "config.json")))
    assert alone == whole and "all but the head" in assumption
    plain, assumption = read_shape(EngineArgs(model=str(folder / "config.json"), quantization="none"))
    assert plain.schemes == ("dense",) and assumption == ""
    with pytest.raises(ParameterError, match=r"quantization.*the model is"):
        read_shape(EngineArgs(model=str(folder / "config.json"), quantization="gguf"))
