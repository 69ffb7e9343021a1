"""GGUF checkpoints that stay quantized compute what a float model of their dequantized weights computes."""

import pytest
import torch
from qiao import LLM
from qiao.build import build_engine
from qiao.cli.plan import read_shape
from qiao.config import EngineArgs
from qiao.errors import ModelError, ParameterError, PlanRefusedError
from qiao.loading import iter_weights, load_config, quantized_weights, resolve
from qiao.loading.gguf_file import open_gguf
from qiao.models import describe
from qiao.quantization import QuantizedWeight

from tests.support.checkpoints import rand_checkpoint
from tests.support.fallback import host_backend, sim_backend
from tests.support.gguf import write_gguf
from tests.support.quantized import BACKENDS, IDS, backend_called, float_logits, load, logits, place

KINDS = ["Q4_0", "Q4_1", "Q8_0"]


def gguf_values(file):
    """The weights as the gguf package dequantizes them."""
    return dict(iter_weights(resolve(file), progress=False, dequantize=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind, backend, tmp_path):
    folder = rand_checkpoint(tmp_path / "hf", tie_word_embeddings=True)
    file = write_gguf(folder, tmp_path / "m.gguf", kind)
    wanted = float_logits(load_config(resolve(file)), gguf_values(file), IDS)
    plan, ops = place(file, backend=backend_called(backend))
    assert "dense" not in plan.shape.schemes
    torch.testing.assert_close(logits(load(file, ops), ops, IDS), wanted, atol=1e-3, rtol=1e-3)


MIXTURES = {
    "q4_k_m": {"attn_v|ffn_down|token_embd": "Q6_K", "": "Q4_K"},
    "q5_k": {"": "Q5_K"},
    "q3_k": {"attn_v": "Q5_K", "ffn_up|output": "Q2_K", "": "Q3_K"},
    "iq4": {"attn_k|ffn_gate": "IQ4_XS", "attn_v": "Q4_1", "token_embd": "Q4_K", "": "IQ4_NL"},
    "q5_1": {"attn_q|ffn_up": "Q5_1", "token_embd": "Q4_1", "": "Q5_0"},
    "some_dense": {"attn_k|ffn_up": "F32", "output": "F16", "": "Q8_0"},
    "not_kept": {"ffn": "IQ4_NL", "attn_q": "TQ2_0", "": "Q8_0"},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixed_types(mixture, backend, tmp_path):
    """Parts of one fused weight with other types and groups; types without a form of their own become float."""
    folder = rand_checkpoint(tmp_path / "hf", hidden_size=256, intermediate_size=256, tie_word_embeddings=True)
    file = write_gguf(folder, tmp_path / "m.gguf", MIXTURES[mixture])
    wanted = float_logits(load_config(resolve(file)), gguf_values(file), IDS)
    _, ops = place(file, backend_called(backend))
    torch.testing.assert_close(logits(load(file, ops), ops, IDS), wanted, atol=1e-3, rtol=1e-3)


def test_the_form_of_a_mixed_weight(tmp_path):
    """Four bits fit in eight, and groups of 32 in groups of 16; next to a plain part all is plain."""
    folder = rand_checkpoint(tmp_path / "hf", hidden_size=256, intermediate_size=256)
    rules = {"attn_v": "Q6_K", "ffn_up": "F32", "ffn_down": "Q5_K", "": "Q4_K"}
    files = resolve(write_gguf(folder, tmp_path / "m.gguf", rules))
    shape = describe(load_config(files), quantized_weights(files))
    forms = {line.name: (line.scheme, line.group_size) for line in shape.linears}
    assert forms == {
        "qkv": ("w8a16", 16),
        "o": ("w4a16", 32),
        "gate_up": ("dense", -1),
        "down": ("w8a16", 32),
        "lm_head": ("w4a16", 32),
    }


@pytest.mark.parametrize(
    "family",
    [
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        {"model_type": "qwen2"},
        {"model_type": "phi3"},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=lambda f: f.get("model_type", "llama-bias"),
)
def test_families(family, tmp_path):
    """Experts in one tensor, biases, projections fused in the file, and the reordered rows of llama's q and k."""
    folder = rand_checkpoint(tmp_path / "hf", **family)
    file = write_gguf(folder, tmp_path / "m.gguf", "Q4_1")
    wanted = float_logits(load_config(resolve(file)), gguf_values(file), IDS)
    _, ops = place(file, host_backend())
    torch.testing.assert_close(logits(load(file, ops), ops, IDS), wanted, atol=1e-3, rtol=1e-3)


def test_a_device_without_the_scheme_leaves_its_weights_on_the_host(tmp_path):
    folder = rand_checkpoint(tmp_path / "hf")
    file = write_gguf(folder, tmp_path / "m.gguf", "Q4_1")
    plan, ops = place(file, sim_backend(chip="dense"))
    assert plan.moved("W[w4a16]")
    assert ops.matmul["w4a16"].device == "cpu"
    wanted = float_logits(load_config(resolve(file)), gguf_values(file), IDS)
    torch.testing.assert_close(logits(load(file, ops), ops, IDS), wanted, atol=1e-3, rtol=1e-3)


def test_what_the_header_announces_is_what_comes(tmp_path):
    folder = rand_checkpoint(tmp_path / "hf")
    files = resolve(write_gguf(folder, tmp_path / "m.gguf", "Q8_0"))
    announced = quantized_weights(files)
    found = {n: w for n, w in iter_weights(files, progress=False) if isinstance(w, QuantizedWeight)}
    assert {n: (w.form, w.shape) for n, w in announced.items()} == {n: (w.form, w.shape) for n, w in found.items()}
    assert all(w.tensors["weight"].is_meta for w in announced.values())
    assert set(describe(load_config(files), announced).schemes) == {"w8a16"}


@pytest.mark.parametrize("pattern", [b"\x00\x7c", b"\x00\x7e"])
def test_a_scale_that_is_no_number_is_named(pattern, tmp_path):
    """Infinity or NaN as the scale of one block would become NaN in every logit."""
    file = write_gguf(rand_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", "Q8_0")
    tensor = open_gguf(file).tensors["blk.1.ffn_down.weight"]
    content = bytearray(file.read_bytes())
    content[tensor.offset : tensor.offset + 2] = pattern
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf.*layers\.1\.mlp\.down_proj"):
        list(iter_weights(resolve(file), progress=False))


def arguments(file, **changes):
    return EngineArgs(model=str(file), device="cpu", num_gpu_blocks_override=8, **changes)


def test_quantization_none_dequantizes_at_load(tmp_path):
    file = write_gguf(rand_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", "Q4_1")
    dense = build_engine(arguments(file, quantization="none")).plan
    assert dense.shape.schemes == ("dense",)
    kept = build_engine(arguments(file, quantization="gguf")).plan
    assert "w4a16" in kept.shape.schemes
    sizes = [sum(item["bytes"] for item in plan.as_dict()["weights"]) for plan in (dense, kept)]
    assert sizes[1] < 0.2 * sizes[0]  # 6 bits for 32, with a float32 scale and zero for 32 weights
    assert kept.shape.dtype == "float32"


def test_a_contradiction_names_both(tmp_path):
    file = write_gguf(rand_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", "Q4_1")
    with pytest.raises(ParameterError, match=r"'awq'.*gguf"):
        build_engine(arguments(file, quantization="awq"))
    with pytest.raises(ParameterError, match=r"'gguf'.*not quantized"):
        build_engine(arguments(tmp_path / "hf", quantization="gguf"))


def test_the_policy_may_refuse_a_scheme(tmp_path, monkeypatch):
    file = write_gguf(rand_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", "Q4_1")
    monkeypatch.setattr("qiao.build.choose", lambda device: sim_backend(chip="dense"))
    monkeypatch.setattr("qiao.build.iter_weights", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(PlanRefusedError, match="w4a16"):
        build_engine(EngineArgs(model=str(file), fallback="deny"))


MIXED = {"attn_v|ffn_down": "Q8_0", "token_embd|output": "F32", "": "Q4_1"}
"""v and down in 8 bits, the rest in 4, the head plain: q, k and v are multiplied as one, in 8 bits."""


@pytest.mark.parametrize(
    ("word", "drop", "schemes", "moved"),
    [
        ("W[w8a16]=dequantize", ("W[w8a16]",), {"dense", "w4a16"}, set()),
        ("W[w4a16]=dequantize", ("W[w8a16]",), {"dense", "w4a16", "w8a16"}, {"w8a16"}),
        ("W=dequantize", ("W[w8a16]", "W[w4a16]"), {"dense"}, set()),
        ("W=dequantize", (), {"dense", "w4a16", "w8a16"}, set()),
    ],
)
def test_the_policy_may_dequantize_what_the_device_lacks(word, drop, schemes, moved, tmp_path, monkeypatch):
    """Only that, and only where it lacks it; the plan that is printed has the sizes of the one that is served."""
    file = write_gguf(rand_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", MIXED)
    monkeypatch.setattr("qiao.build.choose", lambda device: sim_backend())
    policy, names = f"deny,W=allow,{word}", str(tmp_path / "hf")
    told = EngineArgs(model=str(file), tokenizer=names, num_gpu_blocks_override=8, drop=drop, fallback=policy)
    llm = LLM.from_engine_args(told)
    plan = llm.plan
    assert set(plan.shape.schemes) == schemes
    assert {scheme for scheme in schemes if plan.moved(f"W[{scheme}]")} == moved
    wanted = float_logits(load_config(resolve(file)), gguf_values(file), IDS)
    torch.testing.assert_close(torch.cat(list(llm.token_logits(IDS))), wanted, atol=1e-2, rtol=1e-2)
    planned, _ = read_shape(told, schemes_lost(plan.shape.schemes))
    assert planned.linears == plan.shape.linears


def schemes_lost(kept):
    return {"w4a16", "w8a16"} - set(kept)
