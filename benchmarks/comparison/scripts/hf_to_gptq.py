"""A 16-bit folder as a 4-bit checkpoint in the layout of GPTQ, rounded to nearest without calibration.

    python hf_to_gptq.py HF_DIR OUT_DIR GROUP

For speed: layout and arithmetic are those of calibrated checkpoints. Embedding and head stay 16 bit, as is usual.
``qweight`` int32 [K/8, N] holds eight values of a column, ``qzeros`` int32 [K/g, N/8] the zero less one, ``scales``
float16 [K/g, N], ``g_idx`` int32 [K]. Needs torch and safetensors.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def quantize(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes [K, N] in 0..15 around 8, and scales float16 [K/g, N], of ``weight`` [N, K]."""
    outputs, inputs = weight.shape
    values = weight.float().t().reshape(inputs // group, group, outputs)
    scale = (values.abs().amax(1) / 7.5).clamp(min=1e-8).half()
    codes = (values / scale.float()[:, None] + 8).round().clamp(0, 15)
    return codes.reshape(inputs, outputs).int(), scale


def packed(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight neighbours along ``dim`` in one int32, the first in the lowest bits."""
    parts = codes.unflatten(dim, (-1, 8)).unbind(dim + 1)
    out = torch.zeros_like(parts[0])
    for place, part in enumerate(parts):
        out |= part << (4 * place)
    return out


def layer(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """The four tensors of one linear layer."""
    codes, scale = quantize(weight, group)
    return {
        "qweight": packed(codes, 0),
        "qzeros": packed(torch.full(scale.shape, 7, dtype=torch.int32), 1),
        "scales": scale,
        "g_idx": (torch.arange(weight.shape[1]) // group).int(),
    }


def main(source: Path, out: Path, group: int) -> None:
    """Convert."""
    out.mkdir(parents=True, exist_ok=True)
    made: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name.endswith("proj.weight"):
                stem = name.removesuffix("weight")
                made |= {stem + part: value.contiguous() for part, value in layer(tensor, group).items()}
            else:
                made[name] = tensor.half().contiguous()
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float16", "torch_dtype": "float16"}
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    for file in (*source.glob("*.json"), *source.glob("*.jinja")):
        if file.name != "config.json":
            shutil.copy(file, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
