"""Engine and front end in two processes, with typed messages between them."""

from qiao.transport.client import EngineClient, EngineState
from qiao.transport.pool import EnginePool

__all__ = ["EngineClient", "EnginePool", "EngineState"]
