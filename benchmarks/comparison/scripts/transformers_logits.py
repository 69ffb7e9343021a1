"""Run by the interpreter of an environment with transformers and GPTQModel: float32 logits of a quantized folder.

transformers_logits.py MODEL IDS.json OUT.safetensors
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def main() -> None:
    """See the module."""
    folder, ids, out = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu").eval()
    with torch.inference_mode():
        logits = model(torch.tensor([json.loads(Path(ids).read_text())])).logits[0].float()
    kinds = sorted({type(module).__name__ for name, module in model.named_modules() if name.endswith("q_proj")})
    save_file({"logits": logits.contiguous()}, out, {"modules": ",".join(kinds)})


if __name__ == "__main__":
    main()
