"""Vectors for a list of inputs: one engine request each, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qiao.engine.request import EngineRequest
from qiao.errors import OverloadedError
from qiao.frontend.embedding import vector_of
from qiao.server.call import current_call
from qiao.server.generation import RequestClock, room
from qiao.server.protocol.embeddings import PoolingFields, PoolingUsage
from qiao.server.routes.shared import counted
from qiao.server.state import ServerState

if TYPE_CHECKING:
    from qiao.frontend.embedding import Vector


@dataclass(frozen=True)
class Vectors:
    """``vectors`` [E] in the order of the inputs; ``tokens`` is how many the inputs had together."""

    vectors: list[Vector]
    tokens: int

    @property
    def usage(self) -> PoolingUsage:
        """The counts as the protocol has them."""
        return PoolingUsage(prompt_tokens=self.tokens, total_tokens=self.tokens)


async def embed(
    state: ServerState,
    body: PoolingFields,
    call_id: str,
    inputs: Sequence[str | list[int]],
    field: str,
    dimensions: int | None = None,
    normalize: bool | None = None,
) -> Vectors:
    """A vector for each of ``inputs``, which came in the body's ``field``. Raises what the front end and engine raise.

    Cancelling it aborts all of them in the engine; so does the first failure.
    """
    requests = [
        await state.in_worker(
            state.frontend.pooling_request,
            one,
            field,
            request_id=state.engine_id(call_id),
            priority=body.priority,
            cache_salt=body.cache_salt,
            add_special_tokens=body.add_special_tokens,
            truncate=body.truncate_prompt_tokens,
        )
        for one in inputs
    ]
    wanted = state.frontend.pooling.normalize if normalize is None else normalize
    with counted(state), current_call().counted(requests, state.frontend.limit) as ready:
        places = room(state)

        async def one(request: EngineRequest) -> Vector:
            async with places:
                return await _one(state, current_call().in_time(request), dimensions, wanted)

        tasks = [asyncio.create_task(one(request)) for request in ready]
        try:
            vectors = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return Vectors(list(vectors), sum(len(request.prompt_token_ids) for request in requests))


async def _one(state: ServerState, request: EngineRequest, dimensions: int | None, normalize: bool) -> Vector:
    clock, failed = RequestClock(state, request), True
    try:
        async with aclosing(state.client.generate(request)) as outputs:
            output = await anext(outputs)
        vector = vector_of(output.embedding, dimensions, normalize)
        clock.end("length")
        failed = False
    except OverloadedError:
        state.metrics.rejected()
        raise
    finally:
        clock.finish(failed)
    return vector
