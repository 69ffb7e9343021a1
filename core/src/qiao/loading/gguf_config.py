"""Hugging Face configs from GGUF metadata."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from qiao.errors import ModelError
from qiao.loading.gguf_file import GGUFModel

if TYPE_CHECKING:
    import numpy as np

_CLASSES: Mapping[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
)
"""Texts of control tokens that end a turn, as llama.cpp recognises them."""


def gguf_config(model: GGUFModel) -> dict[str, Any]:
    """The keys that ``config.json`` would hold. Raises ``ModelError`` for a family that is not mapped."""
    check_architecture(model)
    model_type, architecture = _CLASSES[model.architecture]
    config = _common(model)
    config.update(model_type=model_type, architectures=[architecture])
    extra = _EXTRAS.get(model.architecture)
    if extra is not None:
        config.update(extra(model, config))
    return config


def check_architecture(model: GGUFModel) -> None:
    """Raise ``ModelError`` for a family whose tensors and keys are not mapped."""
    if model.architecture not in _CLASSES:
        raise ModelError(
            f"{model.path}: GGUF files of the family {model.architecture!r} are not read; those of "
            f"{', '.join(_CLASSES)} are. Take the model's safetensors instead."
        )


def gguf_generation_config(model: GGUFModel) -> dict[str, Any]:
    """End tokens, and sampling defaults where the file carries some."""
    found: dict[str, Any] = {}
    for key, name in _SAMPLING.items():
        value = model.get(f"general.sampling.{key}")
        if value is not None:
            found[name] = value
    ends = [model.get("tokenizer.ggml.eos_token_id"), model.get("tokenizer.ggml.eot_token_id")]
    kinds = model.get("tokenizer.ggml.token_type") or []
    for i, text in enumerate(model.get("tokenizer.ggml.tokens") or []):
        if text in _END_OF_TURN and i < len(kinds) and kinds[i] == 3:
            ends.append(i)
    found["eos_token_id"] = list(dict.fromkeys(i for i in ends if i is not None))
    return found


def _common(model: GGUFModel) -> dict[str, Any]:
    heads = uniform(model, "attention.head_count")
    embedding = _count(model, "embedding_length", _need(model, "embedding_length"))
    config: dict[str, Any] = {
        "hidden_size": embedding,
        "num_hidden_layers": _need(model, "block_count"),
        "intermediate_size": uniform(model, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": uniform(model, "attention.head_count_kv", heads),
        "head_dim": model.hparam("attention.key_length", embedding // heads),
        "max_position_embeddings": _need(model, "context_length"),
        "rms_norm_eps": _short(_need(model, "attention.layer_norm_rms_epsilon")),
        "rope_theta": model.hparam("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "vocab_size": _vocab_size(model),
        "dtype": _dtype(model),
        "rope_scaling": _rope_scaling(model),
    }
    for name in ("bos", "eos", "padding"):
        config[f"{name.replace('padding', 'pad')}_token_id"] = model.get(f"tokenizer.ggml.{name}_token_id")
    return config


def _llama(model: GGUFModel, config: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in model.tensors,
    }
    if "rope_freqs.weight" in model.tensors:
        extra["rope_scaling"] = _llama3_scaling(model, config)
    if model.hparam("expert_count", 0):
        extra.update(
            model_type="mixtral",
            architectures=["MixtralForCausalLM"],
            num_local_experts=model.hparam("expert_count"),
            num_experts_per_tok=_need(model, "expert_used_count"),
        )
    return extra


def _moe(model: GGUFModel, config: dict[str, Any]) -> dict[str, Any]:
    extra = {
        "num_experts": _need(model, "expert_count"),
        "num_experts_per_tok": _need(model, "expert_used_count"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": model.architecture == "qwen3moe",
        "moe_intermediate_size": model.tensors["blk.0.ffn_gate_exps.weight"].shape[1],
    }
    shared = model.tensors.get("blk.0.ffn_gate_shexp.weight")
    if shared is not None:
        extra["shared_expert_intermediate_size"] = shared.shape[0]
    return extra


def _gemma(model: GGUFModel, config: dict[str, Any]) -> dict[str, Any]:
    # llama.cpp's rule: the 27B models scale queries by hidden size over heads, the others by head_dim.
    largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[model.architecture]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    extra: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if largest else config["head_dim"],
        "sliding_window": model.hparam("attention.sliding_window", 4096),
        "attn_logit_softcapping": model.hparam("attn_logit_softcapping"),
        "final_logit_softcapping": model.hparam("final_logit_softcapping"),
    }
    if model.architecture == "gemma3":
        extra.update(rope_local_base_freq=model.hparam("rope.freq_base_swa", 10000.0), sliding_window_pattern=6)
    return extra


def _phi3(model: GGUFModel, config: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {"sliding_window": model.hparam("attention.sliding_window") or None}
    rotary = model.hparam("rope.dimension_count")
    if rotary:
        extra["partial_rotary_factor"] = rotary / config["head_dim"]
    extra["original_max_position_embeddings"] = model.hparam(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    if "rope_factors_long.weight" in model.tensors:
        extra["rope_scaling"] = {
            "type": "longrope",
            "long_factor": _floats(model, "rope_factors_long.weight"),
            "short_factor": _floats(model, "rope_factors_short.weight"),
        }
    return extra


_EXTRAS: Mapping[str, Callable[[GGUFModel, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2moe": _moe,
    "qwen3moe": _moe,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _phi3,
}


def _rope_scaling(model: GGUFModel) -> dict[str, Any] | None:
    kind = model.hparam("rope.scaling.type")
    factor = model.hparam("rope.scaling.factor", model.hparam("rope.scale_linear"))
    if kind in (None, "none") and not factor:
        return None
    if kind in ("linear", None):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = model.hparam("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind == "longrope" or kind == "none":
        return None  # phi3 reads its factors from tensors
    raise ModelError(f"{model.path}: rope scaling {kind!r} is not known. Take the model's safetensors instead.")


def _llama3_scaling(model: GGUFModel, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's four numbers from the factors that the converter made of them; checked by making the factors again."""
    import numpy as np  # late, as in the next function: a front end reads generation configs with this module

    factors = np.array(_floats(model, "rope_freqs.weight"))
    dim = 2 * len(factors)
    wave = 2 * np.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    scaling = {"rope_type": "llama3", "factor": _short(float(factors.max())), "low_freq_factor": 1.0}
    for original in (8192, config["max_position_embeddings"]):
        scaling.update(high_freq_factor=4.0, original_max_position_embeddings=original)
        if np.allclose(llama3_factors(wave, scaling), factors, rtol=1e-3):
            return scaling
    raise ModelError(f"{model.path}: its rope factors are not Llama 3's. Take the model's safetensors instead.")


def llama3_factors(wave: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """What each frequency is divided by; ``wave`` is the wavelength in tokens (Llama 3.1's reference code)."""
    import numpy as np

    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    original = scaling["original_max_position_embeddings"]
    smooth = np.clip((original / wave - low) / (high - low), 0.0, 1.0)
    middle = 1.0 / ((1.0 - smooth) / factor + smooth)
    return np.where(wave > original / low, factor, np.where(wave < original / high, 1.0, middle))


def _floats(model: GGUFModel, name: str) -> list[float]:
    tensor = model.tensors[name]
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        return array("f", stream.read(tensor.size)).tolist()


def _vocab_size(model: GGUFModel) -> int:
    table = model.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError(f"{model.path}: has no token_embd.weight. It is not a language model, or a part is missing.")
    return table.shape[0]


def _dtype(model: GGUFModel) -> str:
    kinds = {tensor.kind.name for tensor in model.tensors.values() if len(tensor.shape) > 1}
    return {"BF16": "bfloat16", "F16": "float16"}.get(next(iter(kinds)), "float32") if len(kinds) == 1 else "float32"


def _need(model: GGUFModel, key: str) -> Any:
    value = model.hparam(key)
    if value is None:
        raise ModelError(f"{model.path}: lacks the key {model.architecture}.{key}. Convert the model again.")
    return value


def uniform(model: GGUFModel, key: str, default: int | None = None) -> int:
    """A number that some converters write per layer. Raises ``ModelError`` when layers differ."""
    value = model.hparam(key, default) if default is not None else _need(model, key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelError(
                f"{model.path}: {model.architecture}.{key} differs from layer to layer, which is not read."
            )
        value = value[0]
    return _count(model, key, value)


def _count(model: GGUFModel, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{model.path}: damaged: {model.architecture}.{key} is {value!r}. Fetch it again.")
    return value


def _short(value: float) -> float:
    """A float32 as the decimal that was meant: 9.999999747378752e-06 is 1e-05."""
    return float(f"{value:.6g}")
