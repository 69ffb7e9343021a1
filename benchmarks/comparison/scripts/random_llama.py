"""A Llama of a given shape with random bfloat16 weights, and the first part of another model's byte-pair vocabulary.

    python random_llama.py OUT_DIR TOKENIZER_DIR SHAPE_JSON

Needs torch and transformers 5.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def truncated(tokenizer: dict[str, Any], size: int) -> dict[str, Any]:
    """tokenizer.json with its first ``size`` tokens. Byte-pair tokens are numbered in the order of their merges, so the
    merges that stay make no token that went."""
    model = tokenizer["model"]
    vocabulary = {text: token for text, token in model["vocab"].items() if token < size}
    merges = [pair for pair in model["merges"] if "".join(pair) in vocabulary]
    return tokenizer | {"model": model | {"vocab": vocabulary, "merges": merges}}


def main(out: Path, tokenizer: Path, shape: dict[str, int]) -> None:
    """Make the folder."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        intermediate_size=shape["intermediate"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(out)
    whole = json.loads((tokenizer / "tokenizer.json").read_text())
    (out / "tokenizer.json").write_text(json.dumps(truncated(whole, shape["vocabulary"]), ensure_ascii=False))
    shutil.copy(tokenizer / "tokenizer_config.json", out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
