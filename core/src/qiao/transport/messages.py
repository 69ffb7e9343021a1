"""The messages between a front end and an engine: msgpack of tagged structs, one struct a message of the channel.

Nothing here knows the socket, so the same messages go over a local one or over TCP. No pickle anywhere.
"""

from __future__ import annotations

import msgspec

from qiao import errors
from qiao.config import EngineArgs
from qiao.engine.request import EngineInfo, EngineRequest, EngineStats, SequenceOutput
from qiao.errors import QiaoError
from qiao.lora.request import LoRARequest

PROTOCOL = 2
"""Version of the messages between hosts; changes with every message that the other side would not understand."""


class Start(msgspec.Struct):
    """The first line on the engine's standard input, as JSON: its end of the socket, and what to build."""

    fd: int
    args: EngineArgs
    log_level: str = "info"
    log_json: bool = False


class Submit(msgspec.Struct, tag="submit"):
    """Front end to engine: queue one request."""

    request: EngineRequest


class Aborted(msgspec.Struct, tag="abort", omit_defaults=True):
    """Front end to engine: nobody waits for these requests any more, or only for their answer ``index``."""

    request_ids: list[str]
    index: int | None = None


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Front end to engine: load a LoRA adapter, and answer with ``AdapterDone``."""

    request: LoRARequest


class DropAdapter(msgspec.Struct, tag="drop_adapter"):
    """Front end to engine: let a LoRA adapter go once no request uses it."""

    number: int


class Stop(msgspec.Struct, tag="stop"):
    """Front end to engine: end the process now."""


class Hello(msgspec.Struct, tag="hello"):
    """Front end to an engine on another host: the first message of a connection."""

    protocol: int


class Alive(msgspec.Struct, tag="alive"):
    """Front end to an engine on another host: it is still there."""


class ErrorInfo(msgspec.Struct, omit_defaults=True):
    """An error as data. ``kind`` is the class name from ``qiao.errors``."""

    kind: str
    message: str
    field: str = ""
    retry_after: float = 1.0


class Ready(msgspec.Struct, tag="ready"):
    """Engine to front end: the model is loaded."""

    info: EngineInfo


class Failed(msgspec.Struct, tag="failed"):
    """Engine to front end: the engine ends, and this is why."""

    error: ErrorInfo


class Refused(msgspec.Struct, tag="refused"):
    """Engine to front end: a request was not taken."""

    request_id: str
    error: ErrorInfo


class Draining(msgspec.Struct, tag="draining"):
    """Engine to front end: send no more; what runs goes on."""


class AdapterDone(msgspec.Struct, tag="adapter_done", omit_defaults=True):
    """Engine to front end: the adapter ``number`` has been loaded, or why not."""

    number: int
    error: ErrorInfo | None = None


class Step(msgspec.Struct, tag="step", omit_defaults=True):
    """Engine to front end: everything that one step made, and now and then the counters."""

    outputs: list[SequenceOutput] = []
    stats: EngineStats | None = None


ToEngine = Submit | Aborted | LoadAdapter | DropAdapter | Stop | Hello | Alive
FromEngine = Ready | Failed | Refused | AdapterDone | Draining | Step


def describe_error(error: BaseException) -> ErrorInfo:
    """``error`` as data. An error that is not Qiao's own becomes a ``QiaoError`` with its class name in the text."""
    if isinstance(error, errors.ParameterError):
        return ErrorInfo("ParameterError", error.detail, field=error.field)
    if isinstance(error, errors.OverloadedError):
        return ErrorInfo("OverloadedError", str(error), retry_after=error.retry_after)
    if isinstance(error, QiaoError):
        name = type(error).__name__
        return ErrorInfo(name if name in errors.__all__ else "QiaoError", str(error))
    return ErrorInfo("QiaoError", f"{type(error).__name__}: {error}")


def rebuild_error(info: ErrorInfo) -> QiaoError:
    """The exception that ``describe_error`` was given, as far as it is one of ``qiao.errors``."""
    if info.kind == "ParameterError":
        return errors.ParameterError(info.field, info.message)
    if info.kind == "OverloadedError":
        return errors.OverloadedError(info.message, info.retry_after)
    kind = getattr(errors, info.kind) if info.kind in errors.__all__ else QiaoError
    rebuilt = kind(info.message)
    assert isinstance(rebuilt, QiaoError)
    return rebuilt
