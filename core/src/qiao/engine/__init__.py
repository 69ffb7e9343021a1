"""Scheduling, paged KV cache, batch building and sampling.

The names are loaded when they are first used: a front end needs ``qiao.engine.request``, and no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qiao.engine.config import EngineConfig
    from qiao.engine.engine import Engine
    from qiao.engine.integrity import IntegrityError

_HOMES = {
    "Engine": "qiao.engine.engine",
    "EngineConfig": "qiao.engine.config",
    "IntegrityError": "qiao.engine.integrity",
}

__all__ = ["Engine", "EngineConfig", "IntegrityError"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'qiao.engine' has no attribute {name!r}")
