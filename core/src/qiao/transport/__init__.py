"""Engine and front end in two processes, with typed messages between them."""

from qiao.transport.client import EngineClient, EngineState
from qiao.transport.messages import Aborted, Failed, FromEngine, Ready, Refused, Step, Stop, Submit, ToEngine

__all__ = [
    "Aborted",
    "EngineClient",
    "EngineState",
    "Failed",
    "FromEngine",
    "Ready",
    "Refused",
    "Step",
    "Stop",
    "Submit",
    "ToEngine",
]
