"""The OpenAI-compatible HTTP server. Import ``serve`` from here; the rest loads with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qiao.server.args import ServerArgs

if TYPE_CHECKING:
    from qiao.config import EngineArgs

__all__ = ["ServerArgs", "serve"]


def serve(args: EngineArgs, server: ServerArgs) -> int:
    """Serve until a signal ends it; the exit status. See ``qiao.server.start.serve``."""
    from qiao.server.start import serve

    return serve(args, server)
