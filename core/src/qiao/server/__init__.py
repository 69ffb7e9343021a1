"""The OpenAI-compatible HTTP server. Import ``serve`` from here; the rest loads with it."""

from __future__ import annotations

from qiao.server.args import ServerArgs
from qiao.server.setup import Setup

__all__ = ["ServerArgs", "Setup", "serve"]


def serve(setup: Setup) -> int:
    """Serve until a signal ends it; the exit status. See ``qiao.server.start.serve``."""
    from qiao.server.start import serve

    return serve(setup)
