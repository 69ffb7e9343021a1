"""``tools`` and ``tool_choice`` of a request, and calls in an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from qiao.errors import ParameterError

MAX_TOOLS = 1024
MAX_NAME = 256


class FunctionCall(BaseModel):
    """``arguments`` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class AnsweredCall(BaseModel):
    """One call of a whole answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionDelta(BaseModel):
    """News of a function call; the name comes once."""

    name: str | None = None
    arguments: str | None = None


class CallChunk(BaseModel):
    """News of call ``index`` in a stream; id and type come once."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


def read_tools(tools: Sequence[Any] | None) -> dict[str, dict[str, Any]]:
    """The schema of each function's parameters by its name. Raises ``ParameterError`` naming the entry."""
    found: dict[str, dict[str, Any]] = {}
    if tools is not None and not 0 < len(tools) <= MAX_TOOLS:
        raise ParameterError("tools", f"must hold 1 to {MAX_TOOLS} tools, or be left out; got {len(tools)}")
    for i, tool in enumerate(tools or ()):
        where = f"tools[{i}]"
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise ParameterError(where, "must be an object of the type function")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise ParameterError(f"{where}.function", f"must be an object, got {function!r:.100}")
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise ParameterError(f"{where}.function.name", f"must be a string of 1 to {MAX_NAME} characters")
        if name in found:
            raise ParameterError(f"{where}.function.name", f"{name!r} is there twice")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ParameterError(f"{where}.function.parameters", "must be a JSON schema, an object")
        found[name] = dict(parameters or {})
    return found


def are_strict(tools: Sequence[Any] | None) -> bool:
    """Whether each function asks for its schema to be kept to the letter."""
    return all(tool["function"].get("strict") is True for tool in tools or ())


def read_choice(choice: Any, names: Mapping[str, Any]) -> tuple[str, str | None]:
    """``tool_choice`` as none, auto, required or named, and the name. Raises ``ParameterError``."""
    if choice is None:
        return ("auto" if names else "none"), None
    if choice in ("none", "auto") if isinstance(choice, str) else False:
        return (choice if names else "none"), None
    if not names:
        raise ParameterError("tool_choice", "needs tools")
    if choice == "required":
        return "required", None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        expected = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
        raise ParameterError("tool_choice", f"must be {expected}, got {choice!r:.100}")
    if name not in names:
        raise ParameterError("tool_choice", f"no tool has the name {name[:100]!r}")
    return "named", name
