"""How flag values are written: sizes, lists, JSON objects."""

from __future__ import annotations

import json
import re
from typing import Any

from qiao.errors import ParameterError

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
"""vLLM's habit: ``32k`` is 32,000 and ``32K`` is 32,768; and units as in ``64MiB``."""

_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_int(flag: str, text: str) -> int:
    """An integer, also as ``32k``, ``32K``, ``1.5G`` or ``64MiB``."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise ParameterError(flag, f"must be an integer, such as 4096, 32k or 64MiB, got {text!r}")
    value = float(match[1]) * _UNITS[match[2]] if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if value != int(value):
        raise ParameterError(flag, f"must be a whole number, got {text!r}")
    return int(value)


def parse_float(flag: str, text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise ParameterError(flag, f"must be a number, got {text!r}") from None


def parse_bool(flag: str, text: str) -> bool:
    """true or false, as a config file or ``--flag=true`` has it."""
    lowered = text.strip().lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ParameterError(flag, f"must be true or false, got {text!r}")


def parse_list(flag: str, texts: list[str]) -> tuple[str, ...]:
    """Strings, given one by one, as ``a,b`` (for operator names) or as one JSON list (``'["*"]'``)."""
    if len(texts) == 1 and texts[0].lstrip().startswith("["):
        value = _json(flag, texts[0])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ParameterError(flag, f"must be a JSON list of strings, got {texts[0]!r}")
        return tuple(value)
    return tuple(texts)


def parse_object(flag: str, text: str) -> dict[str, Any]:
    """A JSON object."""
    value = _json(flag, text)
    if not isinstance(value, dict):
        raise ParameterError(flag, f"must be a JSON object, got {text!r}")
    return value


def dotted(path: str, text: str) -> dict[str, Any]:
    """``a.b`` and a value (JSON, or else a string) as nested objects: ``--hf-overrides.rope_theta 1e6``."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = text
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def merge(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """``more`` over ``base``, object by object."""
    merged = dict(base)
    for key, value in more.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ParameterError(flag, f"is not valid JSON ({error}): {text!r}") from None


def read_yaml(text: str) -> Any:
    """What a YAML text holds, plain values only. A key that stands twice in one mapping is an error: YAML would let the
    last one win, and a whole list of models would go unseen. Raises ``yaml.YAMLError``.
    """
    import yaml  # most starts have no such file

    left, seen = [yaml.compose(text, yaml.SafeLoader)], set()
    while left:
        node = left.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:  # an alias is the node itself again
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += node.value
            continue
        names = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands twice", problem_mark=key.start_mark)
            names.add((key.tag, str(key.value)))  # a key that is no scalar is refused below
            left.append(value)
    return yaml.safe_load(text)
