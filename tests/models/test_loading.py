"""How tensors reach a model: one at a time, in any order and any float type, each mistake named."""

import random
import weakref

import pytest
import qiao_reference
import torch
import transformers
from qiao.contract import PackedWeight
from qiao.errors import ModelError
from qiao.models import create, read_spec
from qiao.optable import MatmulOps
from safetensors.torch import load_file

from tests.models.families import BASE, FAMILIES, config_of
from tests.models.test_published import CHATGLM
from tests.support.models import Paged, build, cpu_ops, reference_model, token_ids

QUERY = "model.layers.1.self_attn.q_proj.weight"


def _llama(**extra):
    return transformers.LlamaConfig(**{**BASE, "num_hidden_layers": 2, **extra})


def _weights(config, **changes):
    weights = {k: v.clone() for k, v in reference_model(config).state_dict().items()}
    weights.update({k.replace("__", "."): v for k, v in changes.items()})
    return weights


def _wanted(config, ids):
    with torch.no_grad():
        return reference_model(config)(torch.tensor([ids]), use_cache=False).logits[0]


def _close(got, want):
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral", "qwen2-moe-some-dense", "qwen3-moe", "gemma3", "glm4"])
def test_saved_checkpoints_load_from_their_raw_config(name, tmp_path):
    """As published: the file's names and config.json, not the names that transformers uses in memory."""
    config, ids = config_of(name), token_ids(20, 128)
    reference_model(config).save_pretrained(tmp_path)
    raw, _ = transformers.PretrainedConfig.get_config_dict(tmp_path)
    model = build(raw, load_file(tmp_path / "model.safetensors").items())
    _close(Paged(model).feed(ids), _wanted(config, ids))


@pytest.mark.parametrize("name", ["llama-mqa-tied", "qwen2", "qwen2-moe"])
def test_any_order(name):
    config, ids = config_of(name), token_ids(12, 128)
    items = list(_weights(config).items())
    random.Random(1).shuffle(items)
    _close(Paged(build(config, items)).feed(ids), _wanted(config, ids))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_cast(stored):
    config, ids = _llama(), token_ids(12, 128)
    weights = {k: v.to(stored) for k, v in _weights(config).items()}
    got = Paged(build(config, weights.items())).feed(ids)
    widened = Paged(build(config, {k: v.float() for k, v in weights.items()}.items())).feed(ids)
    assert got.dtype == torch.float32
    assert torch.equal(got, widened)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-moe", "glm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_and_gives_float32_logits(name, dtype):
    config, ids = config_of(name), token_ids(12, 128)
    model = build(config, _weights(config).items(), dtype=dtype)
    assert model.shape.dtype == str(dtype).removeprefix("torch.")
    got, want = Paged(model, dtype=dtype).feed(ids), _wanted(config, ids)
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.98


def test_gemma_norms_keep_their_precision_in_bfloat16():
    config = config_of("gemma2")
    model = build(config, _weights(config).items(), dtype=torch.bfloat16)
    assert model._norm._weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("tied", "head", "embedding", "uses"),
    [
        (True, False, True, "embedding"),
        (True, True, True, "head"),
        (True, True, False, "head"),
        (False, True, True, "head"),
    ],
)
def test_tied_heads_follow_transformers(tied, head, embedding, uses, tmp_path):
    config, ids = _llama(tie_word_embeddings=tied), token_ids(9, 128)
    weights = _weights(_llama(tie_word_embeddings=False))
    if not head:
        del weights["lm_head.weight"]
    if not embedding:
        del weights["model.embed_tokens.weight"]
    from safetensors.torch import save_file

    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float()
    with torch.no_grad():
        want = reference(torch.tensor([ids]), use_cache=False).logits[0]
    _close(Paged(build(config, weights.items())).feed(ids), want)
    if uses == "embedding":
        assert torch.equal(reference.lm_head.weight, weights["model.embed_tokens.weight"])


def test_an_equal_head_of_a_tied_checkpoint_is_not_kept_twice():
    config = _llama(tie_word_embeddings=True)
    weights = _weights(_llama(tie_word_embeddings=True))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    model = build(config, weights.items())
    assert model._head._linear._weight.data["weight"].data_ptr() == model._embedding._weight.data_ptr()


def test_buffers_of_older_checkpoints_are_ignored():
    config, ids = _llama(), token_ids(9, 128)
    weights = _weights(config)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    weights["model.rotary_emb.inv_freq"] = torch.zeros(8)
    _close(Paged(build(config, weights.items())).feed(ids), _wanted(config, ids))


def test_biases_of_zeros_add_nothing():
    """Tools that quantize write them for every layer."""
    config, ids = _llama(), token_ids(9, 128)
    weights = {**_weights(config), "model.layers.0.mlp.down_proj.bias": torch.zeros(64, dtype=torch.float16)}
    _close(Paged(build(config, weights.items())).feed(ids), _wanted(config, ids))


def test_scales_of_an_fp8_cache_are_ignored():
    config, ids = _llama(), token_ids(9, 128)
    weights = _weights(config)
    weights["model.layers.0.self_attn.k_scale"] = torch.tensor(0.3)
    weights["model.layers.1.self_attn.v_proj.output_scale"] = torch.tensor([0.3])
    _close(Paged(build(config, weights.items())).feed(ids), _wanted(config, ids))


def _raises(config, weights, *words):
    with pytest.raises(ModelError) as caught:
        build(config, weights.items() if isinstance(weights, dict) else weights)
    for word in words:
        assert word in str(caught.value)


class TestMistakes:
    def test_missing(self):
        weights = _weights(_llama())
        del weights[QUERY]
        _raises(_llama(), weights, "lacks", QUERY)

    def test_missing_head_of_an_untied_model(self):
        weights = _weights(_llama())
        del weights["lm_head.weight"]
        _raises(_llama(), weights, "lacks", "lm_head.weight")

    def test_neither_head_nor_embedding_of_a_tied_model(self):
        config = _llama(tie_word_embeddings=True)
        weights = {k: v for k, v in _weights(config).items() if "embed" not in k and "lm_head" not in k}
        _raises(config, weights, "lacks", "model.embed_tokens.weight")

    def test_nothing_at_all_lists_a_few(self):
        with pytest.raises(ModelError, match=r"and \d+ more") as caught:
            build(_llama(), [])
        assert len(str(caught.value)) < 600

    def test_unexpected(self):
        weights = {**_weights(_llama()), "model.layers.0.self_attn.extra.weight": torch.zeros(2)}
        _raises(_llama(), weights, "does not use", "model.layers.0.self_attn.extra.weight")

    def test_a_layer_too_many(self):
        _raises(_llama(), _weights(_llama(num_hidden_layers=3)), "model.layers.2.")

    def test_a_bias_that_the_config_denies(self):
        weights = _weights(_llama(attention_bias=True))
        weights["model.layers.0.self_attn.q_proj.bias"][3] = 1e-3
        _raises(_llama(), weights, "does not use", "model.layers.0.self_attn.q_proj.bias")

    def test_a_bias_that_the_config_promises(self):
        _raises(_llama(mlp_bias=True), _weights(_llama()), "lacks", "model.layers.0.mlp.down_proj.bias")

    @pytest.mark.parametrize(
        ("name", "shape", "asked"),
        [
            (QUERY, (64, 32), [64, 64]),
            ("model.embed_tokens.weight", (120, 64), [128, 64]),
            ("lm_head.weight", (120, 64), [128, 64]),
            ("model.norm.weight", (1, 64), [64]),
            ("model.layers.0.mlp.down_proj.weight", (96, 64), [64, 96]),
        ],
    )
    def test_shape(self, name, shape, asked):
        weights = _weights(_llama())
        weights[name] = torch.zeros(shape)
        _raises(_llama(), weights, name, str(list(shape)), str(asked))

    def test_shape_of_a_fused_tensor(self):
        config = config_of("phi3")
        weights = _weights(config)
        weights["model.layers.0.self_attn.qkv_proj.weight"] = torch.zeros(100, 64)
        _raises(config, weights, "model.layers.0.self_attn.qkv_proj.weight", "[100, 64]", "[128, 64]")

    def test_twice(self):
        items = list(_weights(_llama()).items())
        _raises(_llama(), [*items, (QUERY, torch.zeros(64, 64))], QUERY, "twice")

    def test_fused_and_in_parts(self):
        items = [*_weights(_llama()).items(), ("model.layers.0.self_attn.qkv_proj.weight", torch.zeros(128, 64))]
        _raises(_llama(), items, "qkv_proj", "twice")

    def test_integers(self):
        weights = _weights(_llama())
        weights[QUERY] = torch.zeros(64, 64, dtype=torch.int8)
        _raises(_llama(), weights, QUERY, "int8", "quantization_config")

    def test_numbers_that_float16_cannot_hold(self):
        """Published in bfloat16 and served in float16: infinities would pass unseen until the first answer."""
        weights = {k: v.bfloat16() for k, v in _weights(_llama()).items()}
        weights[QUERY][3, 5] = -1e5
        assert build(_llama(), weights.items(), dtype=torch.bfloat16) and build(_llama(), weights.items())
        with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_proj\.weight holds -\d+.*float16.*bfloat16"):
            build(_llama(), weights.items(), dtype=torch.float16)


class TestMemory:
    def test_no_tensor_outlives_its_packing_but_parts_of_one_fused_weight(self):
        """A plugin that keeps its own form: of the file's tensors only what is being fused may be alive."""

        def pack(scheme, tensors, info, device):
            return PackedWeight(scheme, info, {"weight": tensors["weight"].clone()})

        config = config_of("llama")
        ops = cpu_ops(matmul={"dense": MatmulOps("cpu", pack, qiao_reference.matmul)})
        names, alive, most = _weights(config), [], 0

        def stream():
            nonlocal most
            for name, tensor in names.items():
                fresh = tensor.clone()
                if "norm" not in name and "embed" not in name and "lm_head" not in name:
                    alive.append(weakref.ref(fresh))
                yield name, fresh
                del fresh
                most = max(most, sum(ref() is not None for ref in alive))

        create(config, ops, torch.float32).load(stream())
        assert most <= 3  # query, key, value: the last is packed before the next is asked for

    def test_weights_go_to_the_device_of_their_group(self):
        asked = []

        def pack(scheme, tensors, info, device):
            asked.append((scheme, info.name, info.in_features, info.out_features, device))
            return qiao_reference.pack_weight(scheme, tensors, info, "cpu")

        ops = cpu_ops(matmul={"dense": MatmulOps("meta", pack, qiao_reference.matmul)})
        model = build(_llama(attention_bias=True), _weights(_llama(attention_bias=True)).items(), ops)
        assert ("dense", "model.layers.0.self_attn.qkv_proj", 64, 128, "meta") in asked
        assert len(asked) == 2 * 4 + 1
        assert {x[4] for x in asked} == {"meta"}
        assert model._layers[0]._attention.qkv._bias.device.type == "meta"
        assert model._embedding._weight.device.type == "cpu"

    def test_other_parts_go_to_the_compute_device(self):
        model = build(_llama(), _weights(_llama()).items(), cpu_ops(device="meta"))
        assert model._embedding._weight.device.type == "meta"
        assert model._norm._weight.device.type == "meta"
        assert model._tables[0]._cos.device.type == "meta"


def test_gemma3_with_pictures_runs_as_text():
    text = FAMILIES["gemma3"][1]
    inner = transformers.Gemma3TextConfig(**{**BASE, **text})
    weights, ids = _weights(inner), token_ids(20, 128)
    renamed = {k.replace("model.", "language_model.model.", 1): v for k, v in weights.items() if "lm_head" not in k}
    renamed["vision_tower.vision_model.embeddings.position_embedding.weight"] = torch.zeros(4, 4)
    renamed["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(4, 4)
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner.to_dict(), "vision_config": {}}
    _close(Paged(build(raw, renamed.items())).feed(ids), _wanted(inner, ids))
    newer = {k.replace("language_model.model.", "model.language_model."): v for k, v in renamed.items()}
    _close(Paged(build(raw, newer.items())).feed(ids), _wanted(inner, ids))


def test_gemma3_older_spelling_of_its_two_ropes():
    values = {**BASE, "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 3}
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = transformers.Gemma3TextConfig(**values, rope_theta=5e5, rope_local_base_freq=777.0, rope_scaling=scaling)
    raw = {
        **values,
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": 5e5,
        "rope_local_base_freq": 777.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    ids = token_ids(40, 128)
    _close(Paged(build(raw, _weights(config).items())).feed(ids), _wanted(config, ids))
    assert build(raw, _weights(config).items()).shape.max_position == 256


def test_chatglm_under_its_other_architecture_name():
    from tests.models import published

    raw = {**CHATGLM, "architectures": ["ChatGLMForConditionalGeneration"]}
    weights = published.random_weights(published.chatglm_weights(raw))
    assert Paged(build(raw, weights.items())).feed([1, 2, 3]).shape == (3, 128)


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-mqa-tied"])
def test_a_model_saved_without_its_head_gives_its_hidden_states(name, tmp_path):
    """As models for vectors are published: names without ``model.`` and no ``lm_head``, whatever the config ties."""
    config, ids = config_of(name), token_ids(20, 128)
    bare = reference_model(config).model
    bare.save_pretrained(tmp_path)
    raw, _ = transformers.PretrainedConfig.get_config_dict(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert raw["architectures"][0].endswith("Model")
    assert "embed_tokens.weight" in stored
    with torch.no_grad():
        hidden = bare(torch.tensor([ids])).last_hidden_state[0]
    _close(Paged(build(raw, stored.items())).feed(ids), hidden @ bare.embed_tokens.weight.T)
    # What quantizes such a model, or has adapters for it, finds the same layers.
    translate = read_spec(raw).translate
    for old, weight in stored.items():
        (found, _), (full, _) = *translate(old, weight), *translate(f"model.{old}", weight)
        assert found == full and found.startswith("model.")
