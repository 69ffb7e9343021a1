"""``/v1/models``."""

from __future__ import annotations

from fastapi import APIRouter, Request

from qiao.server.protocol.models import ModelCard, ModelList, ModelPermission
from qiao.server.routes.shared import ERRORS
from qiao.server.state import ServerState, state_of

router = APIRouter()


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=state.created,
        root=state.engine_args.model,
        max_model_len=state.client.info.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=state.created)],
    )


@router.get("/v1/models", responses={401: ERRORS[401]})
async def list_models(request: Request) -> ModelList:
    """All served names that the key covers."""
    state = state_of(request)
    return ModelList(data=[_card(state, name) for name in state.allowed_names()])


@router.get("/v1/models/{model:path}", responses={401: ERRORS[401], 404: ERRORS[404]})
async def retrieve_model(model: str, request: Request) -> ModelCard:
    """One served name, which may contain slashes."""
    state = state_of(request)
    return _card(state, state.check_model(model))
