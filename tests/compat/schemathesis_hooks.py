"""Bodies for the model that is served, with short answers, so that many are good requests."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

MODEL = os.environ.get("QIAO_COMPAT_MODEL", "M")
LONGEST = 4
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Names and limits of the right type only: what is wrong on purpose stays wrong."""
    if not isinstance(body, dict):
        return body
    better = {name: LONGEST for name in _LIMITS if type(body.get(name)) is int and body[name] > LONGEST}
    if isinstance(body.get("model"), str):
        better["model"] = MODEL
        if context.operation.path.startswith("/admin/models"):
            better["name"] = MODEL  # taken, so no engine is started, which would take seconds each time
    return {**body, **better}


@schemathesis.hook
def map_path_parameters(context: schemathesis.HookContext, path_parameters: dict[str, Any]) -> dict[str, Any]:
    """The administrator's routes keep away from the model that all others need; swaps would start engines too."""
    if context.operation.path.startswith("/admin/models") and path_parameters.get("name") == MODEL:
        return {**path_parameters, "name": "other"}
    return path_parameters
