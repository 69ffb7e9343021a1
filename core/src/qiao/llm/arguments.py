"""vLLM's keyword arguments as ``EngineArgs``."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from qiao.config import EngineArgs
from qiao.errors import ParameterError, UsageError
from qiao.vllm_arguments import ALIASES, FIXED, IGNORED

logger = logging.getLogger(__name__)


def engine_args(model: str, given: Mapping[str, Any]) -> EngineArgs:
    """``EngineArgs`` from vLLM's keyword arguments.

    Raises ``TypeError`` with a suggestion for an unknown name, ``UsageError`` for what is not there yet.
    """
    known = set(EngineArgs.names())
    values: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for written, value in given.items():
        name = ALIASES.get(written, written)
        if name in known:
            values[name] = value
        elif "." in name:
            if value is not None:
                field, _, key = name.partition(".")
                parts.setdefault(field, {})[key] = value
        elif name in FIXED:
            only = FIXED[name]
            if value not in only.values:
                allowed = " or ".join(repr(v) for v in only.values)
                raise UsageError(f"{name}={value!r} is not supported: {only.why}; leave it out or pass {allowed}")
        elif name in IGNORED:
            logger.warning("LLM: the argument %s has no effect here", name)
        else:
            raise TypeError(_unknown(name, known))
    values = _converted(values)
    for field, more in parts.items():
        values[field] = {**(values.get(field) or {}), **more}
    return EngineArgs(model=model, **values)


def _converted(values: dict[str, Any]) -> dict[str, Any]:
    """Types that vLLM's users pass, as ``EngineArgs`` holds them. None means the default, as there."""
    optional = {field.name for field in fields(EngineArgs) if field.default is None}
    result = {name: value for name, value in values.items() if value is not None or name in optional}
    for name in ("served_model_name", "drop", "lora_modules"):
        value = result.get(name)
        if name in result:
            result[name] = (value,) if isinstance(value, str) else tuple(value or ())
    for name in ("hf_overrides", "override_generation_config", "pooler_config", "speculative_config"):
        if callable(result.get(name)):
            raise ParameterError(name, "must be a dict; a function is not supported")
        if name in result:
            result[name] = dict(result[name] or {})
    for name in ("dtype", "device", "kv_cache_dtype"):
        if name in result:
            result[name] = str(result[name])
    if "kv_cache_dtype" in result:
        result["kv_cache_dtype"] = result["kv_cache_dtype"].removeprefix("torch.")
    return result


def _unknown(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted({*known, *IGNORED, *FIXED}), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"LLM() got an unexpected keyword argument {name!r}{hint}"
