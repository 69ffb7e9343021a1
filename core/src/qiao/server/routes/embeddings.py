"""``POST /v1/embeddings``, ``/v1/score`` and ``/v1/rerank``."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import Response

from qiao.frontend.embedding import similarity
from qiao.server.body import StrictRoute
from qiao.server.fleet import open_model
from qiao.server.pooling import Vectors, embed
from qiao.server.protocol.embeddings import (
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingFields,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from qiao.server.routes.shared import ERRORS, limit_wait, public_id
from qiao.server.state import ServerState
from qiao.server.streaming import unless_gone

if TYPE_CHECKING:
    from qiao.frontend.embedding import Vector

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/embeddings", response_model=EmbeddingResponse, responses=ERRORS)
async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
    """A vector for each input."""
    state, model, call_id = _open(request, body, "embd")
    work = embed(state, body, call_id, body.inputs(), "input", body.dimensions, body.normalize)
    found = await unless_gone(request.receive, work)
    data = [
        Embedding(index=i, embedding=_shown(vector, body.encoding_format)) for i, vector in enumerate(found.vectors)
    ]
    return _answer(EmbeddingResponse(id=call_id, created=int(time.time()), model=model, data=data, usage=found.usage))


@router.post("/v1/score", response_model=ScoreResponse, responses=ERRORS)
async def create_score(body: ScoreRequest, request: Request) -> Response:
    """The similarity of each pair of texts."""
    state, model, call_id = _open(request, body, "score")
    first, second = body.pairs()
    left = await unless_gone(request.receive, embed(state, body, call_id, first, "text_1"))
    right = await unless_gone(request.receive, embed(state, body, call_id, second, "text_2"))
    sides = left.vectors * len(right.vectors) if len(left.vectors) == 1 else left.vectors
    data = [Score(index=i, score=similarity(a, b)) for i, (a, b) in enumerate(zip(sides, right.vectors, strict=True))]
    usage = Vectors([], left.tokens + right.tokens).usage
    return _answer(ScoreResponse(id=call_id, created=int(time.time()), model=model, data=data, usage=usage))


@router.post("/score", response_model=ScoreResponse, responses=ERRORS)
async def create_score_again(body: ScoreRequest, request: Request) -> Response:
    """The same under vLLM's other path."""
    return await create_score(body, request)


@router.post("/v1/rerank", response_model=RerankResponse, responses=ERRORS)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """The documents in the order of their similarity to the query."""
    state, model, call_id = _open(request, body, "rerank")
    texts = body.texts()
    query = await unless_gone(request.receive, embed(state, body, call_id, [body.query], "query"))
    found = await unless_gone(request.receive, embed(state, body, call_id, texts, "documents"))
    scores = [similarity(query.vectors[0], vector) for vector in found.vectors]
    order = sorted(range(len(texts)), key=lambda i: -scores[i])
    results = []
    for i in order[: body.top_n or None]:
        result = RerankResult(index=i, relevance_score=scores[i])
        if body.return_documents:
            result.document = RerankDocument(text=texts[i])
        results.append(result)
    usage = Vectors([], query.tokens + found.tokens).usage
    return _answer(RerankResponse(id=call_id, model=model, usage=usage, results=results))


@router.post("/rerank", response_model=RerankResponse, responses=ERRORS)
async def rerank_again(body: RerankRequest, request: Request) -> Response:
    """The same under vLLM's other path."""
    return await rerank(body, request)


@router.post("/v2/rerank", response_model=RerankResponse, responses=ERRORS)
async def rerank_v2(body: RerankRequest, request: Request) -> Response:
    """The same under Cohere's path."""
    return await rerank(body, request)


def _open(request: Request, body: PoolingFields, prefix: str) -> tuple[ServerState, str, str]:
    limit_wait(body)
    state, model = open_model(request, body.model, body.user)
    return state, model, public_id(prefix, body, request)


def _shown(vector: Vector, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(x) for x in vector]


def _answer(body: EmbeddingResponse | ScoreResponse | RerankResponse) -> Response:
    return Response(body.model_dump_json(exclude_none=True), media_type="application/json")
