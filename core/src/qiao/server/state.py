"""What the routes share for one model: its engine, its text side, its metrics."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from qiao.config import EngineArgs
from qiao.errors import ParameterError
from qiao.frontend import Frontend
from qiao.lora.request import LoRARequest
from qiao.observability.metrics import Metrics
from qiao.observability.tracing import Tracing
from qiao.server.args import ServerArgs
from qiao.server.call import current_call
from qiao.server.setup import ModelSpec
from qiao.structured_outputs import StructuredOutputsParams
from qiao.transport import EnginePool, EngineState

GRAMMAR_SECONDS = 10.0
"""How long checking a grammar may take before its request is refused."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class ServerState:
    """One model of the server. ``serving`` counts requests that are being answered, ``held`` all that chose it."""

    client: EnginePool
    frontend: Frontend
    spec: ModelSpec
    metrics: Metrics
    tracing: Tracing | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    leaving: bool = False
    serving: int = 0
    held: int = 0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _grammars: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="grammar"))
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="tokenize"))

    @property
    def engine_args(self) -> EngineArgs:
        """How its engine was started."""
        return self.spec.engine

    @property
    def server_args(self) -> ServerArgs:
        """How its answers are read, beside what holds for the whole server."""
        return self.spec.server

    @property
    def model_names(self) -> tuple[str, ...]:
        """The served names: the model's own, then those of its LoRA adapters."""
        return (*self.spec.names, *self.client.adapters.loaded)

    def adapter(self, name: str) -> LoRARequest | None:
        """The LoRA adapter of this name; None for the model itself."""
        return self.client.adapters.loaded.get(name)

    @property
    def ready(self) -> bool:
        """Whether the engine takes requests."""
        return self.client.state is EngineState.READY

    def hold(self) -> None:
        """A request has chosen this model, which must stay until ``Call.end``."""
        self.held += 1
        current_call().at_end.append(self._let_go)

    def _let_go(self) -> None:
        self.held -= 1

    async def close(self) -> None:
        """End the engine. Running requests fail."""
        await self.client.stop()
        for pool in (self._grammars, self._worker):
            pool.shutdown(wait=False)

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
