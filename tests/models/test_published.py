"""Families that transformers does not know, against an independent float64 implementation of their published code."""

from importlib import import_module

import pytest
import torch
from qiao.errors import ModelError
from qiao.models import _FAMILIES, describe
from qiao.models.settings import settings_of

from tests.models import published
from tests.support.models import Paged, build, token_ids

CHATGLM = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_residual_connection_post_layernorm": False,
    "ffn_hidden_size": 96,
    "hidden_size": 64,
    "kv_channels": 16,
    "layernorm_epsilon": 1e-05,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 3,
    "original_rope": True,
    "padded_vocab_size": 128,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
INTERNLM2 = {
    "architectures": ["InternLM2ForCausalLM"],
    "model_type": "internlm2",
    "bias": False,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 128,
}
BAICHUAN = {
    "architectures": ["BaichuanForCausalLM"],
    "model_type": "baichuan",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "model_max_length": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "vocab_size": 128,
    "z_loss_weight": 0,
}
FIRST = {k: v for k, v in BAICHUAN.items() if k != "z_loss_weight"} | {"architectures": ["BaiChuanForCausalLM"]}
CASES = {
    "chatglm3": (CHATGLM, published.chatglm, published.chatglm_weights),
    "chatglm-rope-ratio": ({**CHATGLM, "rope_ratio": 50}, published.chatglm, published.chatglm_weights),
    "internlm2": (INTERNLM2, published.internlm2, published.internlm2_weights),
    "internlm2-mha": ({**INTERNLM2, "num_key_value_heads": 8}, published.internlm2, published.internlm2_weights),
    "baichuan2": (BAICHUAN, published.baichuan, published.baichuan_weights),
    "baichuan1": (FIRST, published.baichuan, published.baichuan_weights),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_prefill_chunks_and_greedy_equal_the_published_code(name):
    config, run, shapes = CASES[name]
    weights, ids = published.random_weights(shapes(config)), token_ids(33, 128)
    model = build(config, weights.items())
    want = run(config, weights, ids)
    torch.testing.assert_close(Paged(model).feed(ids).double(), want, atol=1e-4, rtol=1e-4)
    paged = Paged(model)
    got = torch.cat([paged.feed(ids[:7]), paged.feed(ids[7:20]), *(paged.feed([t]) for t in ids[20:])])
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    tokens = list(ids[:9])
    for _ in range(10):
        tokens.append(int(run(config, weights, tokens)[-1].argmax()))
    assert Paged(model).greedy(ids[:9], 10) == tokens


def test_chatglm_shape():
    shape = describe(CHATGLM)
    assert (shape.vocab_size, shape.max_position, shape.dtype, shape.num_layers) == (128, 256, "float16", 3)
    assert (shape.attention[0].num_heads, shape.attention[0].num_kv_heads, shape.attention[0].head_dim) == (4, 2, 16)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (CHATGLM, {"rmsnorm": False}, ["rmsnorm"]),
        (CHATGLM, {"apply_residual_connection_post_layernorm": True}, ["apply_residual_connection_post_layernorm"]),
        (CHATGLM, {"multi_query_group_num": 3}, ["multi_query_group_num", "3"]),
        (CHATGLM, {"padded_vocab_size": None}, ["padded_vocab_size"]),
        (CHATGLM, {"ffn_hidden_size": None}, ["ffn_hidden_size"]),
        (BAICHUAN, {"hidden_size": 5120, "num_attention_heads": 40}, ["ALiBi", "13B"]),
        (BAICHUAN, {"max_position_embeddings": None}, ["ALiBi"]),
        (INTERNLM2, {"hidden_act": "relu"}, ["hidden_act", "relu"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(base, change, words):
    with pytest.raises(ModelError) as caught:
        describe({**base, **change})
    for word in words:
        assert word in str(caught.value)


def test_internlm2_names_the_wrong_tensor():
    weights = published.random_weights(published.internlm2_weights(INTERNLM2))
    weights["model.layers.1.attention.wqkv.weight"] = torch.zeros(90, 64)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.attention\.wqkv\.weight.*90.*96"):
        build(INTERNLM2, weights.items())


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_config_object_without_its_remote_code_reads_the_same(name):
    """transformers has no class for these types, so loading wraps the file's keys in a plain config."""
    from qiao.loading.config import build_config

    raw = CASES[name][0]
    for extra in ({}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 5000.0}):
        if extra and name.startswith("chatglm"):
            continue
        raw = {**raw, **extra}
        settings = settings_of(build_config(raw))
        family = import_module(f"qiao.models.{_FAMILIES[raw['architectures'][0]]}")
        want = family.spec(settings_of(raw), raw["architectures"][0])
        got = family.spec(settings, raw["architectures"][0])
        assert (got.layers, got.max_position, got.norm_eps) == (want.layers, want.max_position, want.norm_eps)
        assert describe(build_config(raw)) == describe(raw)
