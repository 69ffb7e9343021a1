"""Which adapter a request wants, and the adapters that a server starts with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qiao.errors import ParameterError

RUNTIME_VARIABLES = ("QIAO_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
"""Either one, set to 1 or true, opens the routes that load and unload adapters."""

_FIELD = "lora_modules"
_KEYS = {"name": str, "path": str, "base_model_name": str}


@dataclass(frozen=True)
class LoRARequest:
    """One adapter: a folder (or hub name) in peft's form. Fields in vLLM's order.

    ``lora_int_id`` (1 up) is its identity: one number always means one adapter. ``base_model_name`` is shown as the
    parent. Raises ``ParameterError``.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise ParameterError("lora_name", "must not be empty")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise ParameterError("lora_int_id", f"must be an integer of at least 1, got {self.lora_int_id!r}")
        if not self.lora_path:
            raise ParameterError("lora_path", f"is missing for the adapter {self.lora_name!r}; give its folder")

    @property
    def adapter_id(self) -> int:
        """vLLM's other name of ``lora_int_id``."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """vLLM's other name of ``lora_name``."""
        return self.lora_name

    @property
    def path(self) -> str:
        """vLLM's other name of ``lora_path``."""
        return self.lora_path


def parse_modules(texts: Sequence[str]) -> list[LoRARequest]:
    """The adapters of ``--lora-modules``: ``name=path``, or JSON with ``name``, ``path`` and ``base_model_name``.

    Their ids are 1, 2, ... in order. Raises ``ParameterError``.
    """
    found = [_module(text, i + 1) for i, text in enumerate(texts)]
    names = [one.lora_name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ParameterError(_FIELD, f"name {name!r} twice; each adapter needs a name of its own")
    return found


def _module(text: str, number: int) -> LoRARequest:
    if text.lstrip().startswith("{"):
        given = _object(text)
    else:
        name, _, path = text.partition("=")
        given = {"name": name, "path": path}
    if not given.get("name") or not given.get("path"):
        raise ParameterError(
            _FIELD, f'must be name=path or {{"name": ..., "path": ..., "base_model_name": ...}}, got {text!r}'
        )
    return LoRARequest(given["name"], number, given["path"], given.get("base_model_name"))


def _object(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ParameterError(_FIELD, f"is not valid JSON ({error}): {text!r}") from None
    if not isinstance(given, dict):
        raise ParameterError(_FIELD, f"must hold JSON objects, got {text!r}")
    for key, value in given.items():
        if key not in _KEYS or not (isinstance(value, str) or (key == "base_model_name" and value is None)):
            raise ParameterError(_FIELD, f"{key!r} with {value!r} is not one of {', '.join(_KEYS)} with a text")
    return given
