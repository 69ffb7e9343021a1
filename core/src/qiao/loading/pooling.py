"""How an embedding model makes one vector of a text: the files of sentence-transformers, and vLLM's argument."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qiao.errors import ModelError, ParameterError
from qiao.loading.config import read_json
from qiao.loading.sources import ModelFiles

_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_TYPES = {"LAST": "last", "MEAN": "mean"}
_POOLING_FILE = "1_Pooling/config.json"


@dataclass(frozen=True)
class Pooling:
    """``kind`` is ``last`` or ``mean``; ``normalize`` makes vectors of length one."""

    kind: str = "last"
    normalize: bool = True


def read_pooling(files: ModelFiles, override: Mapping[str, Any]) -> Pooling:
    """What the checkpoint's ``1_Pooling/config.json`` and ``modules.json`` say, the last token where there is none.

    ``override`` is vLLM's ``pooler_config``: ``pooling_type`` (or ``seq_pooling_type``) and ``normalize`` (or
    ``use_activation``). Raises ``ModelError`` for a pooling that is not there, ``ParameterError`` for a wrong override.
    """
    found = Pooling()
    file = files.folder / _POOLING_FILE
    if files.gguf is None and file.is_file() and not _kind_of(override):
        found = Pooling(_kind(read_json(file)), _normalizes(files))
    return _overridden(found, override)


def _kind(config: Mapping[str, Any]) -> str:
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(
            f"{_POOLING_FILE}: pooling by {' and '.join(modes) or 'none'} is not supported, only last token and mean: "
            'choose one with --pooler-config \'{"pooling_type": "LAST"}\''
        )
    return _MODES[modes[0]]


def _normalizes(files: ModelFiles) -> bool:
    """``modules.json`` lists a Normalize module where vectors are to be made of length one."""
    file = files.folder / "modules.json"
    if not file.is_file():
        return True
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        return any(str(module["type"]).endswith("Normalize") for module in modules)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{file}: not the list of modules that it must be ({error}). Fetch it again.") from error


def _kind_of(override: Mapping[str, Any]) -> Any:
    return override.get("seq_pooling_type", override.get("pooling_type"))


def _overridden(pooling: Pooling, override: Mapping[str, Any]) -> Pooling:
    known = ("pooling_type", "seq_pooling_type", "normalize", "use_activation")
    for name in override:
        if name not in known:
            raise ParameterError("pooler_config", f"knows {', '.join(known)}, not {name!r}")
    kind = _kind_of(override)
    if kind is not None:
        if str(kind).upper() not in _TYPES:
            raise ParameterError("pooler_config", f"pooling_type must be LAST or MEAN, got {kind!r}")
        pooling = replace(pooling, kind=_TYPES[str(kind).upper()])
    normalize = override.get("normalize", override.get("use_activation"))
    if normalize is not None:
        if not isinstance(normalize, bool):
            raise ParameterError("pooler_config", f"normalize must be true or false, got {normalize!r}")
        pooling = replace(pooling, normalize=normalize)
    return pooling
