"""From an engine request to results, with the metrics on the way; several prompts run side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from qiao.engine.request import EngineRequest, SequenceOutput
from qiao.errors import OverloadedError
from qiao.frontend import OutputDelta
from qiao.observability.metrics import FinishedRequest
from qiao.observability.tracing import TracedRequest, Tracing
from qiao.outputs import RequestOutput
from qiao.server.call import current_call
from qiao.server.state import ServerState


class RequestClock:
    """Times of one request, from what the engine sends."""

    def __init__(self, state: ServerState, request: EngineRequest) -> None:
        self._metrics, self._tracing = state.metrics, state.tracing
        self._request = request
        self._call = current_call()
        self._scheduled: float | None = None
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._tokens = 0
        self._cached = 0
        self._lengths = [0] * request.params.n
        self._reasons = dict.fromkeys(range(request.params.n), "abort")

    def note(self, output: SequenceOutput, deltas: Sequence[OutputDelta]) -> None:
        """Take in one output of the engine; ``deltas`` is what the client gets of it, nothing after a stop string."""
        made = 0
        for delta in deltas:
            made += len(delta.token_ids)
            self._lengths[delta.index] += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._reasons[delta.index] = delta.finish_reason
        if not made:
            return
        self._call.answer_tokens += made
        self._tokens += made
        now = time.time()
        last = self._last.get(output.index)
        if last is not None:
            self._metrics.next_token(now - last)
        elif self._first is None:
            self._scheduled = output.scheduled
            self._cached = output.num_cached_tokens
            self._first = output.first_token or now
            self._metrics.first_token(max(0.0, now - self._request.arrival))
        self._last[output.index] = now

    def end(self, reason: str) -> None:
        """Why a request without answers in text ended."""
        self._reasons[0] = reason

    def finish(self, failed: bool) -> None:
        """The request is over."""
        now, request = time.time(), self._request
        last = max(self._last.values(), default=now)
        reasons = ["error" if failed and r == "abort" else r for r in self._reasons.values()]
        queue = None if self._scheduled is None else self._scheduled - request.arrival
        prefill = None if self._scheduled is None or self._first is None else self._first - self._scheduled
        ttft = None if self._first is None else self._first - request.arrival
        self._call.ended(reasons, queue, ttft)
        self._metrics.tenant_finished(
            self._call.tenant.name, reasons, len(request.prompt_token_ids), self._tokens, ttft
        )
        if self._call.alias:
            self._metrics.alias_finished(
                self._call.alias, reasons, len(request.prompt_token_ids), self._tokens, ttft, now - request.arrival
            )
        record = FinishedRequest(
            finish_reasons=reasons,
            prompt_tokens=len(request.prompt_token_ids),
            generation_tokens=self._tokens,
            n=request.params.n,
            max_tokens=request.params.max_tokens,
            e2e=now - request.arrival,
            queue=queue,
            prefill=prefill,
            decode=None if self._first is None else last - self._first,
            longest=max(self._lengths),
            cached_tokens=self._cached,
        )
        self._metrics.finished(record)
        if self._tracing is not None:
            self._trace(self._tracing, record, ttft)

    def _trace(self, tracing: Tracing, record: FinishedRequest, first_token: float | None) -> None:
        request = self._request
        span = TracedRequest(
            request_id=request.request_id.rpartition("#")[0] or request.request_id,
            model=self._call.model,
            parent=self._call.trace,
            arrival=request.arrival,
            temperature=request.params.temperature,
            top_p=request.params.top_p,
            first_token=first_token,
            record=record,
        )
        tracing.request(span)


async def run(state: ServerState, request: EngineRequest, prompt: str | None) -> AsyncGenerator[RequestOutput, None]:
    """Cumulative results of one request, counted against the caller's quota.

    Leaving early aborts it in the engine within a step.
    """
    with current_call().counted([request], state.frontend.limit) as (ready,):
        async with aclosing(_run(state, ready, prompt)) as results:
            async for result in results:
                yield result


async def _run(state: ServerState, request: EngineRequest, prompt: str | None) -> AsyncGenerator[RequestOutput, None]:
    processor = state.frontend.processor(request, prompt)
    clock = RequestClock(state, request)
    failed = False
    result: RequestOutput | None = None
    try:
        async with aclosing(state.client.generate(request)) as outputs:
            async for output in outputs:
                result = processor.add(output)
                clock.note(output, processor.deltas)
                yield result
                if result.finished:
                    break  # ends the request in the engine where a stop string did it here
                for index in processor.to_abort:
                    state.client.abort([request.request_id], index)
    except OverloadedError:
        failed = True
        state.metrics.rejected()
        raise
    except Exception:
        failed = True
        raise
    finally:
        clock.finish(failed)
        if result is not None:
            current_call().note_answers(request.request_id, result)


async def run_all(
    state: ServerState, requests: Sequence[tuple[EngineRequest, str | None]]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Results of several requests as they come, each with its place in ``requests``.

    The first failure ends them all, and so does leaving early. No more are in the engine at a time than ``room`` lets.
    """
    if len(requests) == 1:
        async with aclosing(run(state, *requests[0])) as results:
            async for result in results:
                yield 0, result
        return
    with current_call().counted([request for request, _ in requests], state.frontend.limit) as ready:
        texts = [text for _, text in requests]
        async with aclosing(_merge(state, list(zip(ready, texts, strict=True)))) as merged:
            async for pair in merged:
                yield pair


def room(state: ServerState, answers: int = 1) -> asyncio.Semaphore:
    """Places for requests of one call with so many ``answers`` each: enough to fill a step.

    One call must not fill the queue: those who come later would wait for all of it, or get 503.
    """
    info = state.client.info
    return asyncio.Semaphore(max(1, min(info.max_num_seqs, info.max_num_queued // 2) // answers))


async def _merge(
    state: ServerState, requests: Sequence[tuple[EngineRequest, str | None]]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    merged: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()
    places = room(state, requests[0][0].params.n)

    async def pump(place: int) -> None:
        request, text = requests[place]
        try:
            async with places, aclosing(_run(state, current_call().in_time(request), text)) as results:
                async for result in results:
                    merged.put_nowait((place, result))
            merged.put_nowait((place, None))
        except Exception as error:
            merged.put_nowait((place, error))

    tasks = [asyncio.create_task(pump(place)) for place in range(len(requests))]
    running = len(tasks)
    try:
        while running:
            place, item = await merged.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield place, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
