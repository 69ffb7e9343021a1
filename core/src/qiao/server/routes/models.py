"""``/v1/models``."""

from __future__ import annotations

from fastapi import APIRouter, Request

from qiao.errors import NotFoundError
from qiao.server.fleet import Fleet, fleet_of
from qiao.server.protocol.models import ModelCard, ModelList, ModelPermission
from qiao.server.routes.shared import ERRORS

router = APIRouter()


def _card(fleet: Fleet, name: str) -> ModelCard | None:
    """A model, its LoRA adapter, or an alias with what it stands for; None where none of that is there."""
    alias = fleet.aliases.get(name)
    arms = [name] if alias is None else list(alias.weights)
    states = [state for state in map(fleet.find, arms) if state is not None]
    if not states:
        return None
    adapter = states[0].adapter(name) if alias is None else None
    root = states[0].engine_args.model if adapter is None else adapter.lora_path
    return ModelCard(
        id=name,
        created=states[0].created,
        root=root if alias is None else ", ".join(arms),
        parent=None if adapter is None else adapter.base_model_name or states[0].spec.name,
        max_model_len=min(state.client.info.max_model_len for state in states),
        permission=[ModelPermission(id=f"modelperm-{name}", created=states[0].created)],
    )


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """All names that the key covers, those of models and aliases."""
    fleet = fleet_of(request)
    cards = [_card(fleet, name) for name in fleet.allowed_names()]
    return ModelList(data=[card for card in cards if card is not None])


@router.get("/v1/models/{model:path}", responses={404: ERRORS[404]})
async def retrieve_model(model: str, request: Request) -> ModelCard:
    """One name, which may contain slashes."""
    fleet = fleet_of(request)
    fleet.resolve(model, {})  # says what is wrong
    card = _card(fleet, model)
    if card is None:
        raise NotFoundError(f"the model {model[:200]!r} is not loaded")
    return card
