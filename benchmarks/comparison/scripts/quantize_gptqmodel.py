"""Run by the interpreter of an environment with GPTQModel 7: quantizes on the CPU from calibration.jsonl.

quantize_gptqmodel.py MODEL CALIBRATION OUT gptq|awq sym|asym GROUP DAMP LENGTH LAYERS

Only the first LAYERS layers are quantized.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    """See the module; gptq with the settings that ``qiao quantize`` has unless told otherwise."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its own default on two processors, 1, it refuses
    import gptqmodel.quantization.config as configs
    from gptqmodel import GPTQModel

    model_path, data, out, method, form, group, damp, length, layers = sys.argv[1:]
    common: dict[str, Any] = {"bits": 4, "group_size": int(group), "sym": form == "sym", "device": "cpu"}
    common["pack_impl"] = "original"
    count = json.loads((Path(model_path) / "config.json").read_text())["num_hidden_layers"]
    left = "|".join(str(i) for i in range(int(layers), count))
    common["dynamic"] = {rf"-:model\.layers\.({left})\..*": {}} if left else None
    if method == "gptq":
        order = {"desc_act": True, "static_groups": True, "act_group_aware": False}
        config = configs.GPTQConfig(**common, **order, damp_percent=float(damp), offload_to_disk=False)
    else:
        config = configs.AWQConfig(**common, offload_to_disk=False)
    dtype = torch.float32 if method == "gptq" else torch.bfloat16  # its awq packs no other than 16 bits
    model = GPTQModel.load(model_path, config, dtype=dtype)
    texts = [json.loads(line)["text"] for line in Path(data).read_text().splitlines()]
    ids = [model.tokenizer(text)["input_ids"][: int(length)] for text in texts]
    model.quantize([{"input_ids": x, "attention_mask": [1] * len(x)} for x in ids], batch_size=1)
    model.save(out)


if __name__ == "__main__":
    main()
