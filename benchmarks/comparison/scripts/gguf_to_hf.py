"""A GGUF file as a Hugging Face folder in bfloat16, the one source of all 16-bit models of the comparison.

    python gguf_to_hf.py MODEL.gguf OUT_DIR

Needs torch, transformers 5 and gguf.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel


def field(reader: GGUFReader, key: str) -> Any:
    """A value of the file's header, or None."""
    found = reader.fields.get(key)
    return None if found is None else found.contents()


def plain(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model without its mark of having been quantized, which keeps transformers from saving it."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    torch.set_default_dtype(dtype)
    made = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    made.load_state_dict(state)
    return made


def main(source: Path, out: Path) -> None:
    """Convert."""
    reader = GGUFReader(source)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    dtype = torch.bfloat16
    model = plain(AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=dtype), dtype)
    eos, bos, pad = (field(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "bos", "padding"))
    ids = {"eos_token_id": eos, "bos_token_id": bos, "pad_token_id": eos if pad is None else pad}
    model.config.update({name: int(value) for name, value in ids.items() if value is not None})
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    model.save_pretrained(out)
    tokenizer.chat_template = field(reader, "tokenizer.chat_template")
    tokenizer.save_pretrained(out)
    file = out / "tokenizer_config.json"
    # A class that every transformers release knows, since each peer brings its own.
    settings = json.loads(file.read_text()) | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        "add_bos_token": bool(field(reader, "tokenizer.ggml.add_bos_token")),
    }
    file.write_text(json.dumps(settings, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
