"""Run by the interpreter of an environment with transformers and GPTQModel: float32 logits of a quantized folder.

transformers_logits.py MODEL IDS.json OUT.safetensors BACKEND

BACKEND is one of GPTQModel's kernels, or auto for the one that it takes by itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AwqConfig, GPTQConfig


def main() -> None:
    """See the module."""
    folder, ids, out, backend = sys.argv[1:]
    method = AutoConfig.from_pretrained(folder).quantization_config["quant_method"]
    config = {"gptq": GPTQConfig, "awq": AwqConfig}[method](bits=4, backend=backend)  # the rest is the file's
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu", quantization_config=config
    ).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([json.loads(Path(ids).read_text())])).logits[0].float()
    kinds = sorted({type(module).__name__ for name, module in model.named_modules() if name.endswith("q_proj")})
    save_file({"logits": logits.contiguous()}, out, {"modules": ",".join(kinds)})


if __name__ == "__main__":
    main()
