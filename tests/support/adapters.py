"""LoRA adapters as peft writes them, and base checkpoints with an adapter merged into them in float64."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linear_modules(base: Path, targets: Iterable[str] = LINEARS) -> dict[str, tuple[int, int]]:
    """[O, I] of the base checkpoint's linear modules whose last name is in ``targets``."""
    wanted, weights = set(targets), load_file(base / "model.safetensors")
    names = {name.removesuffix(".weight"): tuple(w.shape) for name, w in weights.items() if w.dim() == 2}
    return {name: shape for name, shape in names.items() if name.rpartition(".")[2] in wanted}


def write_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    ranks: Mapping[str, int] | None = None,
    seed: int = 0,
    style: str = "base_model.model.{module}.lora_{side}.weight",
    size: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a random adapter for ``modules``; ``ranks`` are by module, ``style`` is how its tensors are called."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in modules.items():
        r = (ranks or {}).get(module, rank)
        for side, shape in (("A", (r, inputs)), ("B", (outputs, r))):
            noise = torch.randn(shape, generator=generator) * size
            tensors[style.format(module=module, side=side)] = noise.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
        "modules_to_save": None,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    """``base`` with ``scale * B A`` added to its weights, computed in float64, as a checkpoint of its own."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    weights, update = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in update.items():
        match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_A(\.\w+)?\.weight", name)
        if match is None:
            continue
        module, rank = match[1], len(a)
        b = update[name.replace("lora_A", "lora_B")]
        alpha = next((v for k, v in settings.get("alpha_pattern", {}).items() if module.endswith(k)), None)
        alpha = settings["lora_alpha"] if alpha is None else alpha
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + scale * b.double() @ a.double()).to(weight.dtype)
    shutil.copytree(base, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
