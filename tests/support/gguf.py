"""Writes a Hugging Face folder as GGUF the way llama.cpp's converter does, with the gguf package's own name tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants
from safetensors.torch import load_file
from transformers import AutoConfig

ARCHES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
}


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's ``LlamaModel.permute``."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    folder: Path,
    file: Path,
    quantization: str | dict[str, str] = "F32",
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """The weights and hyper-parameters of ``folder`` as one GGUF file.

    ``quantization`` applies to matrices; as a dict, the first pattern that is found in a tensor's name decides. Types
    that the gguf package cannot write get random blocks.
    """
    config = AutoConfig.from_pretrained(folder)
    arch = ARCHES[config.model_type]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    _hparams(writer, config)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    rules = quantization if isinstance(quantization, dict) else {"": quantization}
    for name, values in {**_tensors(folder, config, arch), **(extra or {})}.items():
        kind = next(kind for pattern, kind in rules.items() if re.search(pattern, name))
        if values.ndim > 1 and kind != "F32":
            writer.add_tensor(name, _encoded(values, kind, len(name)), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Where a block keeps its float16 numbers, in bytes."""


def random_blocks(kind: str, count: int, seed: int, size: float = 0.1) -> np.ndarray:
    """Random bytes [count, block], with float16 numbers of about ``size``."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]), dtype=np.uint8)
    for at in HALVES[kind]:
        raw[:, at : at + 2] = random.normal(0, size, (count, 1)).astype(np.float16).view(np.uint8)
    return raw


def _encoded(values: np.ndarray, kind: str, seed: int) -> np.ndarray:
    number = gguf.GGMLQuantizationType[kind]
    try:
        return quants.quantize(values, number)
    except NotImplementedError:
        raw = random_blocks(kind, values.size // gguf.GGML_QUANT_SIZES[number][0], seed, size=2e-4)
        return raw.reshape(*values.shape[:-1], -1)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _hparams(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if getattr(config, key, None):
            add(getattr(config, key))
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    for name in ("bos", "eos"):
        if getattr(config, f"{name}_token_id", None) is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", getattr(config, f"{name}_token_id"))


def _tensors(folder: Path, config: Any, arch: gguf.MODEL_ARCH) -> dict[str, np.ndarray]:
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    loaded = {k: v.float().numpy() for k, v in load_file(folder / "model.safetensors").items()}
    result: dict[str, np.ndarray] = {}
    for name, values in _stacked(loaded).items():
        if arch is gguf.MODEL_ARCH.LLAMA and re.search(r"[qk]_proj\.(weight|bias)$", name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = permute(values, heads)
        if "gemma" in config.model_type and name.endswith("norm.weight"):
            values = values + 1
        target = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        result[target] = np.ascontiguousarray(values)
    return result


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of one layer as one tensor, as the converter writes them."""
    result: dict[str, np.ndarray] = {}
    groups: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        match = re.match(r"(.*experts\.)(\d+)\.(.*)", name)
        if match:
            groups.setdefault(match[1] + match[3], {})[int(match[2])] = values
        else:
            result[name] = values
    for name, experts in groups.items():
        result[name] = np.stack([experts[i] for i in range(len(experts))])
    return result


def as_torch(values: np.ndarray) -> torch.Tensor:
    """A float32 tensor."""
    return torch.from_numpy(np.ascontiguousarray(values))
