"""GGUF weights, one at a time, under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from qiao.errors import ModelError
from qiao.loading.gguf_config import check_architecture, uniform
from qiao.loading.gguf_file import GGUFModel, GGUFTensor
from qiao.quantization import QuantizedWeight, Weight, take_rows
from qiao.quantization.gguf import gguf_form, split_blocks

_TOP: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GEMMA: Mapping[str, str] = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL: Mapping[str, str] = {
    **_LAYER,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_FLOATS: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def iter_gguf(model: GGUFModel, device: str, dequantize: bool = False) -> Iterator[tuple[str, Weight]]:
    """Each tensor once, on ``device``; the experts of a mixture one by one.

    Float tensors keep their type. Quantized matrices whose type has a form of its own stay quantized unless
    ``dequantize``, others become float32. Undone on the way: llama.cpp's reordering of the rows
    of q and k in the llama family, and the 1 that its converter adds to Gemma's norms. Raises ``ModelError``.
    """
    check_architecture(model)
    for tensor in model.tensors.values():
        if tensor.name in _IN_CONFIG:
            continue
        name = hf_name(model, tensor.name)
        if "{expert}" in name:
            for expert in range(tensor.shape[0]):
                yield name.replace("{expert}", str(expert)), _read(_slice(tensor, expert), dequantize).to(device)
        else:
            yield name, _restore(model, tensor.name, _read(tensor, dequantize)).to(device)


@dataclass(frozen=True, slots=True)
class GGUFPlace:
    """A tensor of ``model`` for ``read_plain``; ``shape`` in torch's order."""

    model: GGUFModel
    tensor: GGUFTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """In torch's order."""
        return self.tensor.shape

    @property
    def file(self) -> Path:
        """The part of the model that holds it."""
        return self.tensor.file


def gguf_tensors(model: GGUFModel) -> dict[str, GGUFPlace]:
    """The tensors of a model under their Hugging Face names; ``{expert}`` stands for the first dimension of some."""
    check_architecture(model)
    held = (tensor for tensor in model.tensors.values() if tensor.name not in _IN_CONFIG)
    return {hf_name(model, tensor.name): GGUFPlace(model, tensor) for tensor in held}


def read_plain(place: GGUFPlace) -> torch.Tensor:
    """The values, as ``iter_gguf`` yields them with ``dequantize``."""
    restored = _restore(place.model, place.tensor.name, read_tensor(place.tensor))
    assert isinstance(restored, torch.Tensor)
    return restored


def quantized_gguf(model: GGUFModel) -> dict[str, QuantizedWeight]:
    """The weights that ``iter_gguf`` will yield quantized, on the meta device."""
    check_architecture(model)
    found: dict[str, QuantizedWeight] = {}
    for tensor in model.tensors.values():
        form = gguf_form(tensor.kind.name)
        if form is None or len(tensor.shape) < 2:
            continue
        name = hf_name(model, tensor.name)
        codes = torch.empty(tensor.shape[-2:], dtype=torch.int8, device="meta")
        for expert in range(tensor.shape[0] if "{expert}" in name else 1):
            found[name.replace("{expert}", str(expert))] = QuantizedWeight(form, {"weight": codes})
    return found


def count_gguf(model: GGUFModel) -> int:
    """How many tensors ``iter_gguf`` will yield."""
    tensors = [t for t in model.tensors.values() if t.name not in _IN_CONFIG]
    return sum(t.shape[0] if "_exps." in t.name else 1 for t in tensors)


def hf_name(model: GGUFModel, name: str) -> str:
    """The Hugging Face name of a GGUF tensor; ``{expert}`` stands for the first dimension. Raises ``ModelError``."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    target = _names(model).get(match[2]) if match else None
    if match is None or target is None:
        raise ModelError(f"{model.path}: the tensor {name} is not known for {model.architecture!r}. Update qiao.")
    if model.architecture == "phi3" and target == "mlp.up_proj":
        target = "mlp.gate_up_proj"
    return f"model.layers.{match[1]}.{target}.{kind}"


def raw_bytes(tensor: GGUFTensor) -> np.ndarray:
    """The tensor's bytes as a read-only map of the file, uint8 [size]."""
    return np.memmap(tensor.file, dtype=np.uint8, mode="r", offset=tensor.offset, shape=(tensor.size,))


def read_tensor(tensor: GGUFTensor) -> torch.Tensor:
    """The tensor's values, float32 where it was quantized. Raises ``ModelError`` for a type that cannot be decoded."""
    data = raw_bytes(tensor)
    dtype = _FLOATS.get(tensor.kind.name)
    if dtype is not None:
        return torch.from_numpy(np.array(data)).view(dtype).reshape(tensor.shape)  # a copy, as for safetensors
    from gguf import GGMLQuantizationType, quants  # late: see qiao.loading.ggml_types

    rows = data.reshape(*tensor.shape[:-1], tensor.shape[-1] // tensor.kind.block * tensor.kind.block_bytes)
    try:
        values = quants.dequantize(np.asarray(rows), GGMLQuantizationType(tensor.kind.number))
    except NotImplementedError as error:
        raise ModelError(
            f"{tensor.file}: {tensor.name} has the type {tensor.kind.name}, which is not decoded."
        ) from error
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(tensor.shape)


def _read(tensor: GGUFTensor, dequantize: bool) -> Weight:
    kind = tensor.kind.name
    if dequantize or len(tensor.shape) != 2 or gguf_form(kind) is None:
        return read_tensor(tensor)
    return split_blocks(raw_bytes(tensor), kind, (tensor.shape[0], tensor.shape[1]))


def _names(model: GGUFModel) -> Mapping[str, str]:
    if model.architecture.startswith("gemma"):
        return _GEMMA
    return _MIXTRAL if model.architecture == "llama" and model.hparam("expert_count", 0) else _LAYER


def _slice(tensor: GGUFTensor, expert: int) -> GGUFTensor:
    size = tensor.size // tensor.shape[0]
    return GGUFTensor(tensor.name, tensor.shape[1:], tensor.kind, tensor.file, tensor.offset + expert * size, size)


def _restore(model: GGUFModel, name: str, weight: Weight) -> Weight:
    if model.architecture.startswith("gemma") and name.endswith("norm.weight") and isinstance(weight, torch.Tensor):
        return weight - 1
    if model.architecture == "llama" and ".attn_q." in name:
        return _unpermute(model, name, weight, "attention.head_count")
    if model.architecture == "llama" and ".attn_k." in name:
        kv = model.hparam("attention.head_count_kv") is not None
        return _unpermute(model, name, weight, "attention.head_count_kv" if kv else "attention.head_count")
    return weight


def _unpermute(model: GGUFModel, name: str, weight: Weight, key: str) -> Weight:
    """Rows from pairs side by side (ggml's rope) back to halves (Hugging Face's): undoes the converter's permute."""
    heads, rows = uniform(model, key), weight.shape[0]
    if rows % (2 * heads):
        raise ModelError(f"{model.path}: damaged: {name} has {rows} rows, which do not make {heads} heads.")
    return take_rows(weight, torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten())
