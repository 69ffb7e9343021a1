"""Quantized checkpoints whose settings and tensors disagree, and what the public cases of kind 5 ask for."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from qiao import LLM
from qiao.errors import ModelError, ParameterError
from qiao.loading import quantization_of, quantized_weights, resolve
from safetensors.torch import load_file, save_file

from tests.quantization.test_checkpoints import awq_settings, compressed_settings, float_config, gptq_settings
from tests.support.checkpoints import edit_config, rand_checkpoint
from tests.support.fallback import host_backend
from tests.support.quantized import IDS, float_logits, load, logits, place
from tests.support.quantizers import awq, compressed, gptq, quantized_checkpoint, write_json

DOWN = "model.layers.1.mlp.down_proj"


def computed(folder):
    _, ops = place(folder, host_backend())
    return logits(load(folder, ops), ops, IDS)


def assert_right(folder, values):
    wanted = float_logits(float_config(folder), values, IDS)
    torch.testing.assert_close(computed(folder), wanted, atol=1e-3, rtol=1e-3)


def change(folder, **tensors):
    """Replace tensors of the file; None removes one."""
    held = load_file(folder / "model.safetensors")
    held.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})
    save_file({n: t for n, t in held.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})


class TestB062:
    """Symmetric zeros show by themselves which of GPTQ's formats they have."""

    @pytest.mark.parametrize(("stored_second", "declared"), [(True, "gptq"), (False, "gptq_v2")])
    def test_the_zeros_decide(self, stored_second, declared, tmp_path, caplog):
        settings = gptq_settings(sym=True, checkpoint_format=declared)
        folder, values = quantized_checkpoint(tmp_path, gptq(symmetric=True, second=stored_second), settings)
        with caplog.at_level(logging.WARNING, "qiao"):
            assert_right(folder, values)
        assert sum("the file is right" in message for message in caplog.messages) == 1

    @pytest.mark.parametrize("second", [True, False])
    def test_nothing_is_guessed_for_asymmetric_files(self, second, tmp_path, caplog):
        settings = gptq_settings(checkpoint_format="gptq_v2" if second else "gptq")
        writer = gptq(second=second, zeros=lambda z: np.full_like(z, 8 if not second else 7))
        folder, values = quantized_checkpoint(tmp_path, writer, settings)
        assert_right(folder, values)
        assert not caplog.messages


def test_b065_a_zero_of_0_stays_0(tmp_path):
    folder, values = quantized_checkpoint(tmp_path, awq(zeros=lambda z: z * (z % 3 > 0)), awq_settings())
    assert_right(folder, values)


@pytest.mark.parametrize("act_order", [False, True])
def test_b067_one_group_for_all_inputs_and_biases_kept(act_order, tmp_path):
    settings = gptq_settings(group=-1, desc_act=act_order)
    folder, values = quantized_checkpoint(tmp_path, gptq(group=-1), settings, attention_bias=True)
    change(folder, model__layers__0__self_attn__q_proj__bias=torch.randn(64))
    values["model.layers.0.self_attn.q_proj.bias"] = load_file(folder / "model.safetensors")[
        "model.layers.0.self_attn.q_proj.bias"
    ]
    assert_right(folder, values)


class TestB070:
    """The device and the method agree on a dtype by themselves, or the start says why not."""

    @pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "float32"])
    def test_gptq_in_float16_on_the_cpu(self, dtype, tmp_path):
        folder, values = quantized_checkpoint(tmp_path, gptq(symmetric=True), gptq_settings(sym=True), dtype="float16")
        llm = LLM(str(folder), device="cpu", dtype=dtype, num_gpu_blocks_override=8)
        assert llm.info.dtype == ("float16" if dtype == "auto" else dtype)
        found = torch.cat(list(llm.token_logits(IDS)))
        wanted = float_logits(float_config(folder), {name: value.float() for name, value in values.items()}, IDS)
        assert torch.nn.functional.cosine_similarity(found, wanted, dim=-1).min() > 0.99

    def test_an_impossible_choice(self, tmp_path, monkeypatch):
        folder, _ = quantized_checkpoint(tmp_path, gptq(), gptq_settings())
        backend = host_backend()
        only = replace(backend, capabilities=replace(backend.capabilities, dtypes=("float32",)))
        monkeypatch.setattr("qiao.build.choose", lambda device: only)
        with pytest.raises(ParameterError, match=r"dtype: bfloat16 is not supported by this device; it has float32"):
            LLM(str(folder), dtype="bfloat16")


def mixed(module, shape, random):
    """down_proj plain, gate_proj with 8 bits in groups of 16, the rest with 4 in groups of 32."""
    writer = gptq(8, 16) if "gate_proj" in module else gptq()
    return writer(module, shape, random)


DYNAMIC = {"-:.*down_proj": {}, "+:.*gate_proj": {"bits": 8, "group_size": 16}}
NOT_DOWN = r"lm_head|(q|k|v|o|gate|up)_proj"


class TestB072:
    """Rules for single modules, of which the first that matches counts."""

    def test_rules_for_single_modules(self, tmp_path):
        settings = gptq_settings(lm_head=True, dynamic=DYNAMIC)
        folder, values = quantized_checkpoint(tmp_path, mixed, settings, NOT_DOWN)
        assert_right(folder, values)
        plan, _ = place(folder, host_backend())
        schemes = {line.name: line.scheme for line in plan.shape.linears}
        wanted = {"qkv": "w4a16", "o": "w4a16", "gate_up": "w8a16", "down": "dense", "lm_head": "w4a16"}
        assert schemes == wanted

    def test_without_its_rules_the_checkpoint_is_refused(self, tmp_path):
        folder, _ = quantized_checkpoint(tmp_path, mixed, gptq_settings(lm_head=True), NOT_DOWN)
        with pytest.raises(ModelError, match="gate_proj"):
            computed(folder)

    def test_a_module_that_a_rule_leaves_out_but_that_is_quantized(self, tmp_path):
        folder, _ = quantized_checkpoint(tmp_path, gptq(), gptq_settings(dynamic=DYNAMIC))
        with pytest.raises(ModelError, match=r"down_proj.*dynamic"):
            computed(folder)


class TestTiedHeads:
    """A config that ties the head to the embedding, beside a file that has a head of its own."""

    @pytest.mark.parametrize("linear", [r"lm_head|(q|k|v|o|gate|up|down)_proj", r"(q|k|v|o|gate|up|down)_proj"])
    def test_another_head_is_used(self, linear, tmp_path):
        """Quantized or plain: it differs from the embedding, so it was trained."""
        folder, values = quantized_checkpoint(tmp_path, gptq(), gptq_settings(lm_head=True), linear)
        wanted = float_logits(float_config(folder), values, IDS)
        edit_config(folder, tie_word_embeddings=True)
        torch.testing.assert_close(computed(folder), wanted, atol=1e-3, rtol=1e-3)

    def test_none_is_the_embedding(self, tmp_path):
        folder, values = quantized_checkpoint(tmp_path, gptq(), gptq_settings(), tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")
        assert_right(folder, values)


class TestShards:
    """A module's parts may lie in several files; a file that is not whole is found before any tensor is used."""

    def spread(self, path):
        folder, values = quantized_checkpoint(path, gptq(act_order=True), gptq_settings(desc_act=True))
        held = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names, index = sorted(held), {}
        for i in range(2):
            file = f"model-0000{i + 1}-of-00002.safetensors"
            save_file({n: held[n] for n in names[i::2]}, folder / file, {"format": "pt"})
            index.update(dict.fromkeys(names[i::2], file))
        write_json(folder / "model.safetensors.index.json", weight_map=index)
        return folder, values, index

    def test_parts_in_two_files(self, tmp_path):
        folder, values, _ = self.spread(tmp_path)
        assert_right(folder, values)

    def test_a_file_that_the_index_names_is_missing(self, tmp_path):
        folder, _, _ = self.spread(tmp_path)
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ModelError, match="model-00002-of-00002"):
            computed(folder)

    def test_the_index_names_what_no_file_has(self, tmp_path):
        folder, _, index = self.spread(tmp_path)
        index[f"{DOWN}.qweight_extra"] = "model-00001-of-00002.safetensors"
        write_json(folder / "model.safetensors.index.json", weight_map=index)
        with pytest.raises(ModelError, match="qweight_extra"):
            computed(folder)

    def test_a_part_that_only_the_index_leaves_out(self, tmp_path):
        """As good as missing: a part of a module cannot be guessed."""
        folder, _, index = self.spread(tmp_path)
        del index[f"{DOWN}.g_idx"]
        write_json(folder / "model.safetensors.index.json", weight_map=index)
        with pytest.raises(ModelError, match=r"down_proj lacks its tensor 'g_idx'"):
            computed(folder)


def test_b074_a_cut_file_is_refused(tmp_path):
    folder, _ = quantized_checkpoint(tmp_path, gptq(), gptq_settings())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="truncated"):
        quantized_weights(resolve(folder))


class TestExceptions:
    def test_awq(self, tmp_path):
        settings = awq_settings(modules_to_not_convert=["v_proj"])
        folder, values = quantized_checkpoint(tmp_path / "a", awq(), settings, r"(q|k|o|gate|up|down)_proj")
        assert_right(folder, values)
        folder, _ = quantized_checkpoint(tmp_path / "b", awq(), settings)
        with pytest.raises(ModelError, match=r"v_proj.*modules_to_not_convert"):
            computed(folder)

    def test_compressed_tensors(self, tmp_path):
        settings = compressed_settings(
            {"num_bits": 8, "strategy": "channel"}, ignore=["re:.*o_proj", DOWN], format="int-quantized"
        )
        linear = r"(q|k|v|gate|up)_proj|layers\.0\.mlp\.down_proj"
        folder, values = quantized_checkpoint(tmp_path, compressed(8), settings, linear)
        assert_right(folder, values)


class TestSettingsFiles:
    def test_gptq_beside_a_plain_config(self, tmp_path):
        folder, values = quantized_checkpoint(tmp_path, gptq(group=64), None)
        write_json(folder / "quantize_config.json", bits=4, group_size=64, sym=False, desc_act=False)
        assert quantization_of(resolve(folder)) == "gptq"
        assert_right(folder, values)

    def test_awq_beside_a_plain_config(self, tmp_path):
        folder, values = quantized_checkpoint(tmp_path, awq(), None)
        write_json(folder / "quant_config.json", w_bit=4, q_group_size=32, zero_point=True, version="GEMM")
        assert quantization_of(resolve(folder)) == "awq"
        assert_right(folder, values)

    def test_two_that_disagree(self, tmp_path):
        folder, _ = quantized_checkpoint(tmp_path, gptq(), gptq_settings())
        write_json(folder / "quantize_config.json", bits=4, group_size=64, sym=False, desc_act=False)
        with pytest.raises(ModelError, match=r"group_size is 32 in config\.json and 64 in quantize_config\.json"):
            computed(folder)


class TestDamage:
    def folder(self, path):
        return quantized_checkpoint(path, gptq(), gptq_settings())[0]

    @pytest.mark.parametrize(
        ("part", "tensor"),
        [
            ("scales", torch.ones(3, 64, dtype=torch.float16)),
            ("qzeros", torch.ones(4, 7, dtype=torch.int32)),
            ("qweight", torch.ones(8, 64, dtype=torch.int32)),
            ("g_idx", torch.arange(7, dtype=torch.int32)),
            ("scales", None),
            ("scales", torch.full((4, 64), float("nan"), dtype=torch.float16)),
        ],
    )
    def test_the_tensor_is_named(self, part, tensor, tmp_path):
        folder = self.folder(tmp_path)
        change(folder, **{f"{DOWN}.{part}".replace(".", "__"): tensor})
        with pytest.raises(ModelError, match=DOWN.replace(".", r"\.")):
            computed(folder)

    def test_groups_of_different_sizes(self, tmp_path):
        folder = self.folder(tmp_path)
        owner = torch.zeros(128, dtype=torch.int32)
        owner[:3] = 1
        change(folder, **{f"{DOWN}.g_idx".replace(".", "__"): owner})
        with pytest.raises(ModelError, match=r"down_proj\.g_idx"):
            computed(folder)

    def test_a_plain_weight_beside_the_quantized_one(self, tmp_path):
        folder = self.folder(tmp_path)
        change(folder, **{f"{DOWN}.weight".replace(".", "__"): torch.ones(64, 128)})
        with pytest.raises(ModelError, match=r"down_proj\.weight"):
            computed(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes__nf4"),
        ({"quant_method": "quip"}, "quip"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 32}, "bits is 5"),
        ({"quant_method": "gptq", "bits": "4", "group_size": 32}, "bits must be"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "gemv_fast"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        (compressed_settings({"num_bits": 8, "type": "float", "strategy": "block"}, format="float-quantized"), "block"),
        (compressed_settings({"num_bits": 4, "strategy": "tensor_group"}, format="nvfp4-pack-quantized"), "nvfp4"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_read_is_refused_by_name(settings, message, tmp_path):
    folder = rand_checkpoint(tmp_path)
    edit_config(folder, quantization_config=settings)
    with pytest.raises(ModelError, match=message):
        quantized_weights(resolve(folder))
