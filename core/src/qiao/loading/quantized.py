"""Quantized safetensors checkpoints: the parts of each linear layer become one weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from qiao.errors import ModelError
from qiao.loading.config import read_json
from qiao.loading.safetensors import TensorEntry, read_tensor, tensors_of
from qiao.quantization import Method, QuantizedWeight, Weight, settings_of

OWN_FILES: Mapping[str, str] = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where AutoGPTQ and AutoAWQ write their settings beside, or instead of, ``config.json``."""

_SAME = {"w_bit": "bits", "q_group_size": "group_size"}
"""AutoAWQ's names in its own file."""

_MUST_AGREE = ("quant_method", "bits", "group_size", "sym", "desc_act", "zero_point")


def read_settings(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization settings of a folder whose ``config.json`` is ``config``; None where it is not quantized.

    Raises ``ModelError`` with both values where a file of its own contradicts ``config.json``.
    """
    entry = settings_of(config)
    for file, method in OWN_FILES.items():
        if not (folder / file).is_file():
            continue
        read = {_SAME.get(key, key): value for key, value in read_json(folder / file).items()}
        own = {"quant_method": method, **read}
        if entry is None:
            return own
        for key in _MUST_AGREE:
            if key in own and key in entry and own[key] != entry[key]:
                raise ModelError(
                    f"{folder}: {key} is {entry[key]!r} in config.json and {own[key]!r} in {file}. Keep the right one."
                )
        return {**own, **entry}
    return entry


def promised_weights(folder: Path, method: Method) -> dict[str, QuantizedWeight]:
    """The weights that ``iter_quantized`` will yield quantized, by name, on the meta device.

    Raises ``ModelError`` where no layer is quantized, or one that the settings leave out.
    """
    found, modules = {}, _modules(tensors_of(folder), method)
    if not modules:
        raise ModelError(
            f"{folder}: quantization_config says {method.name}, but no layer has {' or '.join(method.markers)}; "
            "the config and the weights belong to different models"
        )
    for module, parts in modules.items():
        try:
            weight = method.promise(module, {part: entry.shape for part, (_, entry) in parts.items()})
        except (KeyError, IndexError, ValueError) as error:
            raise _damaged(folder, module, parts, error) from error
        if weight is not None:
            found[f"{module}.weight"] = weight
    return found


def iter_quantized(folder: Path, device: str, method: Method) -> Iterator[tuple[str, Weight]]:
    """Each weight of a folder once, on ``device``: plain tensors as they are, and the weights that ``method`` makes."""
    files = tensors_of(folder)
    modules = _modules(files, method)
    owners = {f"{module}.{part}": module for module, parts in modules.items() for part in parts}
    for file, entries in files.items():
        with safe_open(file, framework="pt", device="cpu") as handle:
            for entry in entries:
                module = owners.get(entry.name)
                if module is None:
                    yield entry.name, read_tensor(handle, entry.name).to(device)
                elif module in modules:  # the first of its parts; the others come with it
                    yield f"{module}.weight", _weight(module, modules.pop(module), method, file, handle).to(device)


_Parts = dict[str, tuple[Path, TensorEntry]]


def _modules(files: Mapping[Path, list[TensorEntry]], method: Method) -> dict[str, _Parts]:
    """The quantized modules with the parts that each has and their files."""
    held = {entry.name: (file, entry) for file, entries in files.items() for entry in entries}
    endings = tuple(f".{marker}" for marker in method.markers)
    marked = {name.removesuffix(end) for name in held for end in endings if name.endswith(end)}
    return {
        module: {part: held[f"{module}.{part}"] for part in method.parts if f"{module}.{part}" in held}
        for module in sorted(marked)
    }


def _weight(module: str, parts: _Parts, method: Method, file: Path, handle: Any) -> Weight:
    tensors: dict[str, torch.Tensor] = {}
    for part, (place, entry) in parts.items():
        if place == file:
            tensors[part] = read_tensor(handle, entry.name)
        else:
            with safe_open(place, framework="pt", device="cpu") as other:
                tensors[part] = read_tensor(other, entry.name)
    try:
        return method.weight(module, tensors)
    except (KeyError, IndexError, ValueError, RuntimeError) as error:  # what torch says of sizes that do not fit
        raise _damaged(file, module, parts, error) from error


def _damaged(where: Path, module: str, parts: _Parts, error: Exception) -> ModelError:
    if isinstance(error, KeyError):
        return ModelError(f"{where}: {module} lacks its tensor {error.args[0]!r}. The checkpoint is not complete.")
    shapes = ", ".join(f"{part} {list(entry.shape)}" for part, (_, entry) in parts.items())
    return ModelError(f"{where}: the tensors of {module} do not fit each other ({shapes}). The file is damaged.")
