"""``/v1/responses``: OpenAI's newer API over the same calls as chat."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from qiao.engine.request import EngineRequest
from qiao.errors import ParameterError
from qiao.outputs import CompletionOutput, RequestOutput
from qiao.server.body import StrictRoute
from qiao.server.call import current_call
from qiao.server.fleet import Fleet, fleet_of, open_model
from qiao.server.logprobs import TokenText, chat_logprobs
from qiao.server.protocol.chat import TokenLogprob
from qiao.server.protocol.responses import (
    DeletedResponse,
    InputTokens,
    InputTokensRequest,
    ItemList,
    ResponseObject,
    ResponsesRequest,
)
from qiao.server.responses.answer import Answer, Event
from qiao.server.responses.asked import chat_request, items_of, listed, own_names, tools_of
from qiao.server.responses.service import Running, failure, sse, wire
from qiao.server.responses.store import Stored
from qiao.server.routes.chat import ChatCall
from qiao.server.routes.shared import ERRORS, STREAMS, limit_wait
from qiao.server.state import ServerState
from qiao.server.streaming import Ending, stream_answer, unless_gone

router = APIRouter(route_class=StrictRoute)

KEPT: dict[int | str, dict[str, Any]] = {404: {**ERRORS[404], "description": "No such response"}}

ENDING = Ending(b"", lambda body: sse({"type": "error", "sequence_number": -1, **body.error.model_dump()}))
"""Streams end with their last event; ``response.failed`` is one, and this is for bugs outside of an answer."""


@router.post("/v1/responses", response_model=ResponseObject, responses={**STREAMS, **ERRORS})
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, as OpenAI's API for responses does."""
    limit_wait(body)
    call = await ResponseCall.prepared(request, body)
    if body.background:
        running = await call.in_background()
        if body.stream:
            return await stream_answer(request, running.follow(-1), ENDING)
        return _json(running.answer.response.plain())
    if body.stream:
        return await stream_answer(request, call.stream(), ENDING)
    return _json((await unless_gone(request.receive, call.collect())).plain())


@router.post("/v1/responses/input_tokens", response_model=InputTokens, responses=ERRORS)
async def count_input_tokens(body: InputTokensRequest, request: Request) -> Response:
    """Tokens that a request would have as its prompt."""
    call, _, _ = await _chat_call(request, body, "count")
    with own_names():
        prompt = await call.request()
    return _json(InputTokens(input_tokens=len(prompt.prompt_token_ids)).model_dump())


@router.get("/v1/responses/{response_id}", response_model=ResponseObject, responses={**STREAMS, **KEPT})
async def get_response(
    response_id: str,
    request: Request,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """A response that is kept; its events after ``starting_after`` where it was made with background and stream."""
    found = await fleet_of(request).responses.get(_tenant(), response_id)
    if not stream:
        return _json(_shown(found))
    if isinstance(found, Stored) and found.events is not None:
        return await stream_answer(request, _again(found.events, starting_after), ENDING)
    if isinstance(found, Running) and found.keeps_events:
        return await stream_answer(request, found.follow(starting_after), ENDING)
    raise ParameterError("stream", "needs a response that was made with background=true and stream=true")


@router.delete("/v1/responses/{response_id}", response_model=DeletedResponse, responses=KEPT)
async def delete_response(response_id: str, request: Request) -> Response:
    """Forget a response."""
    await fleet_of(request).responses.delete(_tenant(), response_id)
    return _json(DeletedResponse(id=response_id).model_dump())


@router.post("/v1/responses/{response_id}/cancel", response_model=ResponseObject, responses=KEPT)
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response that runs in the background."""
    return _json(await fleet_of(request).responses.cancel(_tenant(), response_id))


@router.get("/v1/responses/{response_id}/input_items", response_model=ItemList, responses=KEPT)
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The items that the request itself brought, newest first unless asked otherwise."""
    found = await fleet_of(request).responses.get(_tenant(), response_id)
    items = listed(found.items if isinstance(found, Running) else found.input, response_id)
    if order == "desc":
        items.reverse()
    if after is not None:
        names = [item["id"] for item in items]
        if after not in names:
            raise ParameterError("after", f"no item has the id {after[:100]!r}")
        items = items[names.index(after) + 1 :]
    data = items[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return _json(ItemList(data=data, first_id=first, last_id=last, has_more=len(items) > limit).model_dump())


class ResponseCall:
    """One call of the route, once its prompt is known."""

    def __init__(
        self,
        fleet: Fleet,
        state: ServerState,
        body: ResponsesRequest,
        call: ChatCall,
        request: EngineRequest,
        model: str,
    ) -> None:
        self._fleet = fleet
        self._state = state
        self._body = body
        self._call = call
        self._request = request
        self._naming = TokenText(state.frontend.table, body.return_tokens_as_token_ids)
        self._answer = Answer(self._asked(model), self._logprobs)

    @classmethod
    async def prepared(cls, request: Request, body: ResponsesRequest) -> ResponseCall:
        """All that can refuse the request has looked at it."""
        fleet = fleet_of(request)
        if body.background and not fleet.responses.kept:
            raise ParameterError("background", "this server keeps no responses (--responses-db off)")
        call, state, model = await _chat_call(request, body, f"resp_{uuid.uuid4().hex}")
        with own_names():
            prompt = await call.request()
        return cls(fleet, state, body, call, prompt, model)

    def _asked(self, model: str) -> ResponseObject:
        body, params = self._body, self._request.params
        text = body.text.format if body.text is not None else None
        reasoning = body.reasoning
        return ResponseObject(
            id=self._call.id,
            created_at=int(time.time()),
            status="queued" if body.background else "in_progress",
            background=body.background,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=model,
            parallel_tool_calls=body.parallel_tool_calls,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning={
                "effort": reasoning.effort if reasoning is not None else None,
                "summary": reasoning.summary if reasoning is not None else None,
            },
            safety_identifier=body.safety_identifier,
            store=body.store and self._fleet.responses.kept,
            temperature=params.temperature,
            text={"format": text or {"type": "text"}, "verbosity": "medium"},
            tool_choice=body.tool_choice or "auto",
            tools=tools_of(body),
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            user=body.user,
        )

    def _logprobs(self, answer: CompletionOutput, start: int) -> list[TokenLogprob]:
        if not self._body.shows_logprobs:
            return []
        new = (answer.logprobs or [])[start:]
        return chat_logprobs(answer.token_ids[start:], new, self._body.top_logprobs or 0, self._naming).content or []

    async def _events(self) -> AsyncGenerator[Event, None]:
        """All events of a good answer, stored before the last of them is told. Raises where the engine does."""
        latest: RequestOutput | None = None
        async with aclosing(self._call.pieces(self._request)) as pieces:
            async for parts, result in pieces:
                if latest is None:
                    for event in self._answer.begin():
                        yield event
                latest = result
                for event in self._answer.add(parts, result):
                    yield event
        assert latest is not None, "the engine ended a request without any output"
        for event in self._answer.finish(latest):
            yield event
        await self._keep()
        yield self._answer.last()

    async def _keep(self) -> None:
        response = self._answer.response
        if response.store and not response.background:
            stored = Stored(_tenant(), response.plain(), items_of(self._body))
            response.store = await self._fleet.responses.keep(stored)

    async def collect(self) -> ResponseObject:
        """The whole response."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return self._answer.response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events as they come. An error before the first of them is raised, later ones are events."""
        begun = False
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    begun = True
                    yield sse(event)
        except Exception as error:
            if not begun:
                raise
            self._answer.fail(failure(error))
            await self._keep()
            yield sse(self._answer.last())

    async def in_background(self) -> Running:
        """Begin, and wait for nothing."""
        call, began, response, auditor = current_call(), time.time(), self._answer.response, self._fleet.auditor

        def ended() -> None:
            self._state.held -= 1
            if auditor is not None:
                auditor.background(call, response.id, response.status, began)

        share = self._fleet.responses.share(call.tenant.name)
        running = Running(call, self._answer, items_of(self._body), self._body.stream, ended, share)
        await self._fleet.responses.start(running, self._events())
        self._state.held += 1  # the model stays, as it does for a client
        return running


async def _chat_call(request: Request, body: InputTokensRequest, call_id: str) -> tuple[ChatCall, ServerState, str]:
    state, model = open_model(request, body.model, body.user)
    history = await fleet_of(request).responses.history(_tenant(), body.previous_response_id)
    with own_names():
        return ChatCall(state, chat_request(body, history), model, call_id), state, model


async def _again(events: list[bytes], after: int) -> AsyncGenerator[bytes, None]:
    for event in events[after + 1 :]:
        yield wire(event)


def _tenant() -> str:
    return current_call().tenant.name


def _shown(found: Running | Stored) -> dict[str, Any]:
    return found.stored().response if isinstance(found, Running) else found.response


def _json(content: dict[str, Any]) -> Response:
    return JSONResponse(content)
