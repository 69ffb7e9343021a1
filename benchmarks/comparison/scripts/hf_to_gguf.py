"""A Llama folder as a GGUF file in float16, with the tokenizer of another GGUF file cut to the folder's vocabulary.

    python hf_to_gguf.py HF_DIR TOKENIZER.gguf OUT.gguf

Needs torch, safetensors and gguf.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k in the order of ggml's rope: the two halves of a head interleaved."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The folder's tensors under the names of GGUF."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            count = heads.get(".".join(name.split(".")[-2:]))
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise SystemExit(f"{file}: no GGUF name for {name}")
            yield target, permute(tensor, count) if count else tensor


def add_tokenizer(writer: gguf.GGUFWriter, source: gguf.GGUFReader, size: int) -> None:
    """Copy the tokenizer's part of a header, with the first ``size`` tokens and their merges."""
    fields = {key: field for key, field in source.fields.items() if key.startswith("tokenizer.")}
    tokens = fields["tokenizer.ggml.tokens"].contents()[:size]
    kept = set(tokens)
    for key, field in fields.items():
        value = field.contents()
        if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
            value = value[:size]
        elif key == "tokenizer.ggml.merges":
            value = [pair for pair in value if pair.replace(" ", "", 1) in kept]
        kind = field.types[0]
        writer.add_key_value(key, value, kind, sub_type=field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)


def main(folder: Path, tokenizer: Path, out: Path) -> None:
    """Write the file."""
    config = json.loads((folder / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(folder.parent.name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float((config.get("rope_parameters") or config).get("rope_theta", 10000.0)))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    add_tokenizer(writer, gguf.GGUFReader(tokenizer), config["vocab_size"])
    for name, tensor in tensors(folder, config):
        writer.add_tensor(name, (tensor.float() if tensor.dim() == 1 else tensor.half()).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*(Path(text) for text in sys.argv[1:4]))
