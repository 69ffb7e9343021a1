"""Shapes from the config alone, and refusals that name architecture and reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qiao.contract import AttentionShape
from qiao.errors import ModelError
from qiao.models.generic import describe_generic

from tests.support.generic import random_model, tiny_config


def test_shape_comes_from_a_config_without_weights() -> None:
    raw = {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "intermediate_size": 16384,
        "vocab_size": 50432,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    }
    shape = describe_generic(raw)
    assert shape.architecture == "GPTNeoXForCausalLM"
    assert (shape.dtype, shape.max_position, shape.vocab_size) == ("float16", 2048, 50432)
    assert shape.attention == (AttentionShape(48, 32, 32, 128),)
    found = {
        x.name if x.rows == "T" else "head": (x.in_features, x.out_features, x.count, x.rows) for x in shape.linears
    }
    assert found == {
        "query_key_value": (4096, 3 * 4096, 48, "T"),
        "dense": (4096, 4096, 48, "T"),
        "dense_h_to_4h": (4096, 16384, 48, "T"),
        "dense_4h_to_h": (16384, 4096, 48, "T"),
        "head": (4096, 50432, 1, "N"),
    }


@pytest.mark.parametrize("model_type", ["gpt2", "stablelm", "cohere", "granite"])
def test_linears_count_every_matrix_of_the_model(model_type: str) -> None:
    config = tiny_config(model_type)
    model = random_model(config)
    matrices = sum(p.numel() for n, p in model.named_parameters(remove_duplicate=False) if p.ndim == 2)
    embedded = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    shape = describe_generic(config)
    assert sum(x.in_features * x.out_features * x.count for x in shape.linears) == matrices - embedded


def test_windows_follow_the_layers() -> None:
    shape = describe_generic(tiny_config("olmo3", sliding_window=5, num_hidden_layers=8))
    assert [(a.count, a.sliding_window) for a in shape.attention] == [(3, 5), (1, 0), (3, 5), (1, 0)]
    assert shape.num_layers == 8


def test_soft_cap_is_seen() -> None:
    shape = describe_generic(tiny_config("vaultgemma", head_dim=16, attn_logit_softcapping=30.0))
    assert {a.soft_cap for a in shape.attention} == {30.0}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v3", {}, "head sizes"),
    ("gpt_oss", {"num_local_experts": 4}, "s_aux"),
    ("falcon", {}, "replaceable"),
    ("bloom", {}, "position_ids"),
    ("mpt", {}, "position_ids"),
    ("mamba", {}, "linear_attention"),
    ("jamba", {}, "linear_attention"),
    ("qwen3_next", {}, "linear_attention"),
    ("llama4_text", {}, "chunked_attention"),
    ("rwkv", {}, "position_ids"),
    ("bert", {}, "not causal"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "neighbours"),
    ("gpt_neox", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
]


@pytest.mark.parametrize(("model_type", "changes", "reason"), REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(model_type: str, changes: dict[str, Any], reason: str) -> None:
    config = tiny_config(model_type, architectures=["SomeModelForCausalLM"], **changes)
    with pytest.raises(ModelError, match="SomeModelForCausalLM") as caught:
        describe_generic(config)
    assert reason in str(caught.value)


def test_encoder_decoder_is_refused() -> None:
    with pytest.raises(ModelError, match="encoder-decoder"):
        describe_generic({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})


@pytest.mark.parametrize("raw", [{}, {"model_type": "no_such_model"}])
def test_unknown_model_type(raw: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="model_type"):
        describe_generic(raw)


def test_describing_leaves_the_callers_config_alone() -> None:
    config = tiny_config("gpt_neox")
    before = config.to_dict()
    attention = config._attn_implementation
    describe_generic(config)
    assert config.to_dict() == before
    assert config._attn_implementation == attention
