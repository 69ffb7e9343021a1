"""What the routes share: one object a server, made at start."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from fastapi import Request

from qiao.config import EngineArgs
from qiao.errors import NotFoundError, ParameterError
from qiao.frontend import Frontend
from qiao.observability.metrics import Metrics
from qiao.server.access import Tenants
from qiao.server.args import ServerArgs
from qiao.server.auditing import Auditor
from qiao.server.call import current_call
from qiao.server.errors import ApiError
from qiao.structured_outputs import StructuredOutputsParams
from qiao.transport import EngineClient, EngineState

GRAMMAR_SECONDS = 10.0
"""How long checking a grammar may take before its request is refused."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class ServerState:
    """``draining`` refuses new work; ``serving`` counts requests that are being answered."""

    client: EngineClient
    frontend: Frontend
    engine_args: EngineArgs
    server_args: ServerArgs
    metrics: Metrics
    tenants: Tenants
    auditor: Auditor | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    serving: int = 0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _grammars: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="grammar"))
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="tokenize"))

    @property
    def model_names(self) -> tuple[str, ...]:
        """The served names; answers carry the first where a request names none."""
        return self.engine_args.served_model_name or (self.engine_args.model,)

    @property
    def healthy(self) -> bool:
        """Whether a new request would be taken."""
        return not self.draining and self.client.state is EngineState.READY

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ``NotFoundError`` for one that is not served, ``ForbiddenError`` for one that
        the caller's key does not cover.
        """
        if name is None:
            name = self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.allowed_names())
            raise NotFoundError(f"the model {name[:200]!r} does not exist; this server has {served}")
        current_call().check_model(name)
        return name

    def allowed_names(self) -> list[str]:
        """The served names that the caller's key covers."""
        return [name for name in self.model_names if current_call().tenant.allows(name)]

    def check_open(self) -> None:
        """Raises 503 while the server drains."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})

    def engine_id(self, public_id: str) -> str:
        """An id for the engine: unique even where clients choose their ids."""
        return f"{public_id}#{next(self._numbers)}"

    async def in_worker(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run tokeniser or template work off the event loop, one call at a time: tokenisers are not thread-safe."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, lambda: function(*args, **kwargs))

    async def check_grammar(self, wanted: StructuredOutputsParams | None) -> None:
        """Have a constraint checked on a thread of its own, so that the request finds its grammar ready.

        Raises ``ParameterError`` for what cannot be enforced, or not in time.
        """
        if wanted is None:
            return
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._grammars, self.frontend.grammar, wanted)
        try:
            await asyncio.wait_for(asyncio.shield(work), GRAMMAR_SECONDS)
        except asyncio.TimeoutError:
            work.add_done_callback(lambda done: done.exception())  # whatever comes of it, nobody waits any more
            raise ParameterError(wanted.origin, f"takes longer than {GRAMMAR_SECONDS:g} s to check") from None


def state_of(request: Request) -> ServerState:
    """The server's state, for a route."""
    state = request.app.state.qiao
    assert isinstance(state, ServerState)
    return state
