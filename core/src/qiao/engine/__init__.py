"""Scheduling, paged KV cache, batch building and sampling."""

from qiao.engine.config import EngineConfig
from qiao.engine.engine import Engine
from qiao.engine.integrity import IntegrityError

__all__ = ["Engine", "EngineConfig", "IntegrityError"]
