"""Configs: what is missing or contradictory is named with its field and file."""

from dataclasses import replace

import pytest
import torch
import transformers
from qiao.errors import ModelError
from qiao.models import architectures, create, describe

from tests.models.families import BASE, FAMILIES, config_of
from tests.support.models import cpu_ops

RAW = {**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _without(*fields, **changes):
    return {k: v for k, v in {**RAW, **changes}.items() if k not in fields}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_raw_dict_and_config_object_describe_alike(name, tmp_path):
    config = config_of(name)
    config.architectures = None
    want = describe(config)
    assert describe(config.to_dict()) == want
    config.save_pretrained(tmp_path)
    raw, _ = transformers.PretrainedConfig.get_config_dict(tmp_path)
    assert describe(raw) == want


def test_shape_of_llama_3_8b():
    shape = describe(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        }
    )
    assert (shape.dtype, shape.max_position, shape.num_layers) == ("bfloat16", 8192, 32)
    assert shape.kv_bytes_per_token(2) == 131072
    assert replace(shape, kv_dtype="int8").kv_bytes_per_token(1) == 65536 + 32 * 2 * 8 * 4  # codes, then scales
    parameters = sum(x.in_features * x.out_features * x.count for x in shape.linears)
    assert parameters + 128256 * 4096 + 65 * 4096 == 8_030_261_248, "the published parameter count"


@pytest.mark.parametrize(
    "field", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
@pytest.mark.parametrize("gone", [True, False])
def test_missing_or_null_field(field, gone):
    raw = _without(field) if gone else {**RAW, field: None}
    with pytest.raises(ModelError, match=rf"config\.json: {field} is missing"):
        describe(raw)
    with pytest.raises(ModelError, match=field):
        create(raw, cpu_ops(), torch.float32)


def test_missing_context():
    with pytest.raises(ModelError, match="max_position_embeddings"):
        describe(_without("max_position_embeddings"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", True),
        ("num_attention_heads", 2.5),
        ("rms_norm_eps", "small"),
        ("rope_theta", []),
        ("head_dim", -8),
        ("attention_bias", "yes"),
        ("tie_word_embeddings", 1),
        ("hidden_act", 3),
        ("hidden_act", "relu"),
        ("architectures", "LlamaForCausalLM"),
    ],
)
def test_wrong_type_or_value(field, value):
    with pytest.raises(ModelError, match=rf"config\.json: {field} "):
        describe({**RAW, field: value})


def test_head_counts():
    with pytest.raises(ModelError, match=r"num_key_value_heads is 3.*4 attention heads"):
        describe({**RAW, "num_key_value_heads": 3})
    with pytest.raises(ModelError, match=r"hidden_size is 66"):
        describe({**RAW, "hidden_size": 66})
    assert describe({**RAW, "hidden_size": 66, "head_dim": 16}).attention[0].head_dim == 16
    with pytest.raises(ModelError, match="rotates 15"):
        describe({**RAW, "head_dim": 15})


@pytest.mark.parametrize("raw", [_without("num_key_value_heads"), {**RAW, "num_key_value_heads": None}])
def test_absent_key_heads_mean_one_for_each_query_head(raw):
    assert describe(raw).attention[0].num_kv_heads == 4


@pytest.mark.parametrize("raw", [_without("head_dim"), {**RAW, "head_dim": None}])
def test_absent_head_dim_follows_from_the_hidden_size(raw):
    assert describe(raw).attention[0].head_dim == 16


def test_the_file_is_named_where_it_is_known(tmp_path):
    config = transformers.LlamaConfig(**BASE)
    config.name_or_path = str(tmp_path)
    config.hidden_act = "relu"
    with pytest.raises(ModelError, match=str(tmp_path)):
        describe(config)


@pytest.mark.parametrize(
    ("extra", "windows"),
    [
        ({}, {0: 3}),
        ({"sliding_window": 16, "layer_types": ["full_attention"] * 3, "use_sliding_window": True}, {0: 3}),
        ({"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 0}, {0: 3}),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, {0: 3}),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, {0: 1, 16: 2}),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, {0: 3}),
    ],
)
def test_windows_of_qwen2(extra, windows):
    shape = describe({**RAW, "architectures": ["Qwen2ForCausalLM"], **extra})
    assert {a.sliding_window: a.count for a in shape.attention} == windows


@pytest.mark.parametrize("types", [["full_attention"], "full_attention", ["full_attention", "x", "full_attention"]])
def test_wrong_layer_types(types):
    with pytest.raises(ModelError, match="layer_types"):
        describe({**RAW, "architectures": ["Qwen2ForCausalLM"], "layer_types": types})


def test_more_experts_chosen_than_there_are():
    raw = {**RAW, "architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3}
    with pytest.raises(ModelError, match="num_experts_per_tok is 3"):
        describe(raw)


def test_bidirectional_gemma_is_refused():
    raw = {**RAW, "architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        describe(raw)


def test_neither_architecture_nor_type():
    with pytest.raises(ModelError, match="architectures"):
        describe({k: v for k, v in RAW.items() if k not in ("architectures", "model_type")})
    with pytest.raises(ModelError, match="must be a dict"):
        describe("llama")


def test_every_architecture_has_a_module():
    from importlib import import_module

    from qiao.models import _FAMILIES, _MODEL_TYPES

    for name in architectures():
        assert callable(import_module(f"qiao.models.{_FAMILIES[name]}").spec)
    assert set(_MODEL_TYPES.values()) <= set(architectures())


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_absent_fields_take_the_defaults_of_transformers(name):
    """A terse file, as published before transformers 5, means the same model as the config with every default."""
    from importlib import import_module

    from qiao.models import _FAMILIES, _MODEL_TYPES
    from qiao.models.settings import settings_of

    config = config_of(name)
    architecture = _MODEL_TYPES[config.model_type]
    read = import_module(f"qiao.models.{_FAMILIES[architecture]}").spec
    terse = settings_of({**BASE, **FAMILIES[name][1]})
    assert read(terse, architecture) == read(settings_of(config), architecture)
