"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API over the same calls as chat."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from fastapi.responses import Response

from qiao.server import messages
from qiao.server.body import StrictRoute
from qiao.server.fleet import open_model
from qiao.server.protocol.messages import CountRequest, MessagesRequest, MessagesResponse, TokenCount
from qiao.server.routes.chat import ChatCall
from qiao.server.routes.shared import ERRORS, STREAMS, limit_wait
from qiao.server.streaming import stream_answer, unless_gone

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/messages", response_model=MessagesResponse, responses={**STREAMS, **ERRORS})
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    limit_wait(body)
    state, model = open_model(request, body.model, body.user)
    call_id = f"msg_{uuid.uuid4().hex}"
    call = ChatCall(state, messages.chat_request(body), model, call_id)
    with messages.own_names():
        engine_request = await call.request()
    if body.stream:
        events = messages.Events(call_id, model).of(call.pieces(engine_request))
        return await stream_answer(request, events, messages.ENDING)
    whole = messages.answer(call_id, model, call.pieces(engine_request))
    return _whole(await unless_gone(request.receive, whole))


@router.post("/v1/messages/count_tokens", response_model=TokenCount, responses=ERRORS)
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Tokens that a request would have as its prompt."""
    state, model = open_model(request, body.model)
    call = ChatCall(state, messages.chat_request(body), model, "count")
    prompt = await call.request()
    return _whole(TokenCount(input_tokens=len(prompt.prompt_token_ids)))


def _whole(body: MessagesResponse | TokenCount) -> Response:
    """Every field, also those that nobody set: Anthropic's clients read the types of blocks."""
    return Response(body.model_dump_json(), media_type="application/json")
