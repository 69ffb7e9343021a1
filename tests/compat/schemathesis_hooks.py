"""Bodies for the model that is served, with short answers, so that many are good requests."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

MODEL = os.environ.get("QIAO_COMPAT_MODEL", "M")
LONGEST = 4
PATIENCE = 60_000
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_TEXTS = ("query", "text_1", "text_2", "documents")


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Names and limits of the right type only: what is wrong on purpose stays wrong."""
    if not isinstance(body, dict):
        return body
    better = {name: LONGEST for name in _LIMITS if type(body.get(name)) is int and body[name] > LONGEST}
    better |= {name: _said(body[name]) for name in _TEXTS if name in body}
    if type(body.get("deadline_ms")) in (int, float) and 0 < body["deadline_ms"] < PATIENCE:
        better["deadline_ms"] = PATIENCE  # else most bodies that fill in all fields are late
    if isinstance(body.get("model"), str):
        better["model"] = MODEL
        if context.operation.path.startswith("/admin/models"):
            better["name"] = MODEL  # taken, so no engine is started, which would take seconds each time
    return {**body, **better}


def _said(value: Any) -> Any:
    """Texts with something in them: what a schema allows and a model without a first token cannot take."""
    if isinstance(value, list):
        return [_said(one) for one in value]
    if isinstance(value, dict) and "text" in value:
        return {**value, "text": _said(value["text"])}
    return "a" if value == "" else value


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: Any, kwargs: Any) -> None:
    """The administrator's routes keep away from the model that all others need; swaps would start engines too.

    Here and not where values are made, as some are not made but learned from answers, names of models among them.
    """
    named = (case.path_parameters or {}).get("name")
    if case.operation.path.startswith("/admin/models") and str(named).endswith(MODEL):  # or its other name, org/M
        case.path_parameters["name"] = "other"
