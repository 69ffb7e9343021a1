"""LoRA adapters on disk, as peft writes them: ``adapter_config.json`` and ``adapter_model.safetensors``.

The update of a module is ``scale * B A`` (arXiv 2106.09685): ``scale`` is ``lora_alpha / r``, and with ``use_rslora``
``lora_alpha / sqrt(r)`` (arXiv 2312.03732). What is more than that (DoRA, trained biases, whole modules, other bases)
is refused by its name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from qiao.errors import ModelError
from qiao.loading.config import read_json
from qiao.loading.safetensors import read_header, read_tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
"""Names of both generations of peft (with the adapter's name after A or B, and without), and of transformers."""

_OTHER_TENSORS = {
    "lora_magnitude_vector": "DoRA is not supported; train the adapter with use_dora=False, or merge it into the model",
    "lora_embedding_": "adapters of embeddings are not supported; leave embeddings out of target_modules",
    "modules_to_save": "whole modules are not supported; train without modules_to_save, or merge them into the model",
    "lora_B.bias": "biases are not supported; train with lora_bias=False",
}
_MUST_BE = {
    "bias": ("none", "trained biases are not supported; train with bias='none', or merge them into the model"),
    "use_dora": (False, "DoRA is not supported; train with use_dora=False, or merge the adapter into the model"),
    "modules_to_save": (None, "whole modules are not supported; train without them, or merge them into the model"),
    "lora_bias": (False, "biases are not supported; train with lora_bias=False"),
    "fan_in_fan_out": (False, "it is for layers with transposed weights, which no model here has"),
    "layer_replication": (None, "copied layers are not supported; merge the adapter into the model"),
    "target_parameters": (None, "only linear modules can have an adapter; merge it into the model"),
    "trainable_token_indices": (None, "new token embeddings are not supported; merge them into the model"),
    "use_qalora": (False, "QALoRA is not supported; merge the adapter into the model"),
    "alora_invocation_tokens": (None, "activated LoRA is not supported; train a plain adapter"),
}
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base weights too: the adapter alone is not the update."""


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The update ``b @ a`` of one linear module: ``a`` [r, I] as stored, ``b`` [O, r] float32 with the scale in it.

    ``tensors`` are their names in the file, for errors.
    """

    a: torch.Tensor
    b: torch.Tensor
    tensors: tuple[str, str]


@dataclass(frozen=True, slots=True)
class LoraFile:
    """An adapter. ``modules`` are by the base checkpoint's module names; ``digest`` is of all that it depends on."""

    path: str
    modules: Mapping[str, LoraModule]
    digest: bytes

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(module.a.shape[0] for module in self.modules.values())


def adapter_folder(path: str, download_dir: str | None = None) -> Path:
    """The folder of an adapter: a local path, or a name on the Hugging Face hub. Raises ``ModelError``."""
    try:
        local = Path(path).expanduser()
        if local.is_dir():
            return local
        there = local.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name that no file can have, or nobody's home folder
        raise ModelError(f"{path:.200}: cannot be the name of a folder: {error!s:.200}") from None
    if there or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
        raise ModelError(f"{path}: no such folder; an adapter is a folder with {CONFIG} and {WEIGHTS}")
    from qiao.loading.hub import fetch_huggingface

    return fetch_huggingface(path, None, download_dir)


def read_adapter(path: str, max_rank: int, download_dir: str | None = None) -> LoraFile:
    """Read and check an adapter. Raises ``ModelError`` naming the file, the tensor or the setting, with a remedy."""
    folder = adapter_folder(path, download_dir)
    config = read_json(folder / CONFIG)
    settings = _Settings(folder, config)
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelError(_no_weights(folder))
    pairs: dict[str, dict[str, str]] = {}
    for entry in read_header(file):
        match = _NAME.fullmatch(entry.name)
        if match is None:
            raise ModelError(f"{file}: tensor {entry.name}: {_refusal(entry.name)}")
        pairs.setdefault(match["module"], {})[match["side"]] = entry.name
    if not pairs:
        raise ModelError(f"{file}: holds no tensors. Save the adapter again, with save_pretrained.")
    modules = {}
    with safe_open(file, framework="pt") as handle:
        for module, names in pairs.items():
            modules[module] = _module(file, handle, module, names, settings, max_rank)
    digest = hashlib.sha256((folder / CONFIG).read_bytes() + b"\0" + file.read_bytes()).digest()
    return LoraFile(path, modules, digest)


def _module(
    file: Path, handle: Any, module: str, names: Mapping[str, str], settings: _Settings, max_rank: int
) -> LoraModule:
    for side, other in (("A", "B"), ("B", "A")):
        if side not in names:
            raise ModelError(
                f"{file}: tensor {names[other]} has no lora_{side} beside it. Save the adapter again, with "
                "save_pretrained."
            )
    if not settings.targets(module):
        raise ModelError(
            f"{file}: tensor {names['A']} belongs to none of the target_modules of {CONFIG}; the two files belong to "
            "different adapters"
        )
    a, b = (_tensor(file, handle, names[side]) for side in "AB")
    rank, scale = settings.rank_and_scale(module)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ModelError(
            f"{file}: tensors {names['A']} {list(a.shape)} and {names['B']} {list(b.shape)} are not of the rank {rank} "
            f"that {CONFIG} says (r, rank_pattern); the two files belong to different adapters"
        )
    if rank > max_rank:
        raise ModelError(
            f"{file}: tensor {names['A']} has the rank {rank}, and --max-lora-rank is {max_rank}; start with "
            f"--max-lora-rank {rank}"
        )
    return LoraModule(a, b.float() * scale, (names["A"], names["B"]))


def _tensor(file: Path, handle: Any, name: str) -> torch.Tensor:
    tensor = read_tensor(handle, name)
    if tensor.dim() != 2 or not tensor.is_floating_point() or tensor.element_size() == 1:
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise ModelError(f"{file}: tensor {name} is {kind}, expected a floating point matrix; save it as bfloat16")
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"{file}: tensor {name} holds NaN or infinity; the training has failed, take another one")
    return tensor


class _Settings:
    """What ``adapter_config.json`` says."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._where, self._config = folder / CONFIG, config
        kind = config.get("peft_type")
        if kind != "LORA":
            raise self._error("peft_type", f"is {kind!r}; only LORA adapters are served, or merge it into the model")
        for field, (wanted, why) in _MUST_BE.items():
            if config.get(field, wanted) not in (wanted, [], {}, None):
                raise self._error(field, f"is {config[field]!r}: {why}")
        start = str(config.get("init_lora_weights", "")).lower()
        if start.startswith(_OTHER_BASES):
            raise self._error(
                "init_lora_weights",
                f"is {start!r}, which changes the base weights too; convert the adapter to a plain one when saving it "
                "(save_pretrained(..., path_initial_model_for_weight_conversion=...))",
            )
        self._rank = self._number("r", config.get("r"), int)
        self._alpha = self._number("lora_alpha", config.get("lora_alpha"), float)
        self._ranks = self._patterns("rank_pattern", int)
        self._alphas = self._patterns("alpha_pattern", float)

    def _error(self, field: str, text: str) -> ModelError:
        return ModelError(f"{self._where}: {field} {text}")

    def _number(self, field: str, value: Any, kind: type) -> Any:
        good = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or (kind is int and value < 1):
            wanted = "an integer of at least 1" if kind is int else "a number"
            raise self._error(field, f"must be {wanted}, got {value!r}; save the adapter again, with save_pretrained")
        return kind(value)

    def _patterns(self, field: str, kind: type) -> list[tuple[re.Pattern[str], Any]]:
        given = self._config.get(field) or {}
        if not isinstance(given, dict):
            raise self._error(field, f"must be an object, got {given!r}")
        return [
            (self._compiled(field, rf"(?:.*\.)?(?:{key})"), self._number(field, value, kind))
            for key, value in given.items()
        ]

    def _compiled(self, field: str, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise self._error(field, f"holds {pattern!r}, which is not a regular expression ({error})") from None

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """r and the factor of the update of ``module``, by the first pattern that matches, as peft has it."""
        rank: int = next((value for pattern, value in self._ranks if pattern.fullmatch(module)), self._rank)
        alpha: float = next((value for pattern, value in self._alphas if pattern.fullmatch(module)), self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def targets(self, module: str) -> bool:
        """Whether ``target_modules`` covers ``module``: ``all-linear``, a regular expression, or names."""
        wanted = self._config.get("target_modules")
        if isinstance(wanted, str):
            return wanted == "all-linear" or bool(self._compiled("target_modules", wanted).fullmatch(module))
        if not isinstance(wanted, list) or not all(isinstance(one, str) for one in wanted):
            raise self._error("target_modules", f"must be a text or a list of names, got {wanted!r}")
        return any(module == one or module.endswith(f".{one}") for one in wanted)


def _refusal(name: str) -> str:
    found = [text for part, text in _OTHER_TENSORS.items() if part in name]
    return (
        found[0] if found else "is not a LoRA weight of a linear module; save the adapter alone, with save_pretrained"
    )


def _no_weights(folder: Path) -> str:
    if (folder / "adapter_model.bin").is_file():
        return (
            f"{folder}: holds the adapter as a pickle file (adapter_model.bin), which can run code when loaded. Save "
            "it with save_pretrained(..., safe_serialization=True) on a machine that you trust."
        )
    return f"{folder}: lacks {WEIGHTS}. Is the download complete?"
