"""Model configs, with remote code only when asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qiao.errors import ModelError
from qiao.loading.sources import ModelFiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def load_config(
    files: ModelFiles, trust_remote_code: bool = False, overrides: Mapping[str, Any] | None = None
) -> PretrainedConfig:
    """The config: transformers' class where it knows the type, else a plain one with the keys of ``config.json``.

    ``overrides`` replaces keys as written in the file, nested dicts key by key. Code of the checkpoint runs only with
    ``trust_remote_code``. Raises ``ModelError`` naming the file.
    """
    raw, where = plain_config(files, overrides), config_file(files)
    try:
        return build_config(raw, files.folder if trust_remote_code else None)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{where}: the config was not accepted ({error}). Mend it, or override keys with hf_overrides."
        ) from error


def plain_config(files: ModelFiles, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The keys of ``config.json`` with ``overrides``, without transformers, whose config classes take seconds to
    import. Raises ``ModelError`` naming the file.
    """
    raw = merged(read_raw_config(files), overrides or {})
    _check_rope(raw, config_file(files))
    return raw


def config_file(files: ModelFiles) -> Path:
    """The file that the config comes from, for messages."""
    return files.gguf or files.folder / "config.json"


def read_raw_config(files: ModelFiles) -> dict[str, Any]:
    """The keys of ``config.json``, or the same made from a GGUF file's metadata."""
    if files.gguf is not None:
        from qiao.loading.gguf_config import gguf_config

        return gguf_config(files.header)
    return read_json(files.folder / "config.json")


def build_config(raw: Mapping[str, Any], code_folder: Path | None = None) -> PretrainedConfig:
    """A config object from the keys of a ``config.json``; ``code_folder`` allows that folder's own config class."""
    # Here, because they import torch, and a front end reads JSON with this module.
    from transformers import CONFIG_MAPPING, PretrainedConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError('config.json has no model_type. Add it, for example "model_type": "llama".')
    if code_folder is not None and "AutoConfig" in raw.get("auto_map", {}):
        reference = raw["auto_map"]["AutoConfig"]
        own: Any = get_class_from_dynamic_module(reference, code_folder, local_files_only=True)
        made = own.from_dict(dict(raw))
        assert isinstance(made, PretrainedConfig)
        return made
    if model_type in CONFIG_MAPPING:
        made = CONFIG_MAPPING[model_type].from_dict(dict(raw))
        assert isinstance(made, PretrainedConfig)
        return made
    known = type("PlainConfig", (PretrainedConfig,), {"model_type": model_type})
    config: PretrainedConfig = known(**{k: v for k, v in raw.items() if k != "model_type"})
    return config


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``; nested dicts are merged key by key."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ``ModelError`` naming the file."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file}: not found. Is the download complete?") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable as JSON ({error}). Fetch it again.") from error
    if not isinstance(data, dict):
        raise ModelError(f"{file}: must hold a JSON object, holds a {type(data).__name__}.")
    return data


def _check_rope(raw: Mapping[str, Any], where: Path) -> None:
    """Refuse a rope block whose two type keys disagree: reading either one would be a guess."""
    for key in ("rope_scaling", "rope_parameters"):
        block = raw.get(key)
        if block is None:
            continue
        if not isinstance(block, Mapping):
            raise ModelError(f"{where}: {key} must be an object or null, got {block!r}.")
        old, new = block.get("type"), block.get("rope_type")
        if old is not None and new is not None and old != new:
            raise ModelError(f"{where}: {key} has type {old!r} and rope_type {new!r}, which differ. Keep one of them.")
