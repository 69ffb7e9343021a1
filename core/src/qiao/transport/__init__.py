"""Engine and front end in two processes, with typed messages between them."""

from qiao.transport.client import EngineClient, EngineState

__all__ = ["EngineClient", "EngineState"]
