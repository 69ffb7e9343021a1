"""``/admin``: models and aliases come and go while the server runs. There only with ``--admin-key``, which it needs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import WithJsonSchema

from qiao.errors import NotFoundError, ParameterError
from qiao.server.access import ADMINISTRATOR
from qiao.server.body import StrictRoute
from qiao.server.config_file import AliasEntry, read_model
from qiao.server.errors import ApiError
from qiao.server.flags import file_values
from qiao.server.fleet import Fleet, fleet_of
from qiao.server.protocol.admin import AliasStatus, FleetStatus, ModelStatus, SwapStatus
from qiao.server.routes.shared import ERRORS
from qiao.server.setup import ModelSpec
from qiao.server.state import ServerState


def _administrator(request: Request) -> None:
    """Whoever comes here past the check of keys is refused. Raises ``ApiError``."""
    if request.scope.get(ADMINISTRATOR) is not True:
        raise ApiError(401, "needs the administrator's key")


router = APIRouter(route_class=StrictRoute, prefix="/admin", dependencies=[Depends(_administrator)])

CHANGES: dict[int | str, dict[str, Any]] = {
    409: {"description": "The name is taken, or the model went meanwhile"},
    **{status: ERRORS[status] for status in (400, 404, 500, 503)},
}

DRAIN_SECONDS = 300.0
"""How long requests may go on on a model that leaves, where the administrator says nothing else."""

Drain = Annotated[float, Query(ge=0, le=86_400)]

Entry = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {"type": "object", "required": ["model"], "properties": {"model": {"type": "string", "minLength": 1}}}
    ),
]
"""A model as it stands in ``qiao.yaml``."""


@router.get("/models")
async def list_models(request: Request) -> FleetStatus:
    """What is served and what comes or goes."""
    return _status(fleet_of(request))


@router.post("/models", status_code=201, responses=CHANGES)
async def load_model(body: Entry, request: Request) -> FleetStatus:
    """Load one more model. Answers when it is served, or with the reason why it cannot be."""
    fleet = fleet_of(request)
    await fleet.start(_spec(fleet, body))
    return _status(fleet)


@router.put("/models/{name:path}", responses=CHANGES)
async def swap_model(name: str, body: Entry, request: Request, drain_seconds: Drain = DRAIN_SECONDS) -> SwapStatus:
    """Load another model beside the one of this name, hand its name over, let the old one finish, and end it."""
    fleet = fleet_of(request)
    spec = _spec(fleet, {"name": name, **body}).renamed(_names(name, body))
    dropped = await fleet.swap(spec, drain_seconds)
    return SwapStatus(**dict(_status(fleet)), dropped_adapters=dropped)


@router.delete("/models/{name:path}", responses=CHANGES)
async def unload_model(name: str, request: Request, drain_seconds: Drain = DRAIN_SECONDS) -> FleetStatus:
    """Take a model away: new requests get 404 at once, running ones finish first."""
    fleet = fleet_of(request)
    await fleet.stop(name, drain_seconds)
    return _status(fleet)


@router.put("/aliases/{name:path}", responses=CHANGES)
async def put_alias(name: str, body: AliasEntry, request: Request) -> FleetStatus:
    """Add an alias or change its weights. Only those clients move whom the new weights take away."""
    fleet = fleet_of(request)
    fleet.set_alias(body.alias(name))
    return _status(fleet)


@router.delete("/aliases/{name:path}", responses={404: ERRORS[404]})
async def delete_alias(name: str, request: Request) -> FleetStatus:
    """Take an alias away."""
    fleet = fleet_of(request)
    if fleet.aliases.pop(name, None) is None:
        raise NotFoundError(f"there is no alias {name[:200]!r}")
    return _status(fleet)


def _names(name: str, body: Entry) -> tuple[str, ...]:
    """The names of a successor: the old one's own name stays the first."""
    more = body.get("name", ())
    given = (more,) if isinstance(more, str) else tuple(more)
    return (name, *(one for one in given if one != name))


def _spec(fleet: Fleet, body: Entry) -> ModelSpec:
    spec = read_model(body, "body", file_values, fleet.defaults, fleet.server_args)
    if spec.engine.trust_remote_code and not fleet.defaults.get("trust_remote_code"):
        raise ParameterError("trust-remote-code", "is possible in the file of --config only")
    return spec


def _status(fleet: Fleet) -> FleetStatus:
    return FleetStatus(
        models=[_model_status(state) for state in fleet.everywhere],
        loading=sorted(fleet.loading),
        aliases=[
            AliasStatus(name=one.name, weights=dict(one.weights), sticky=list(one.sticky))
            for one in fleet.aliases.values()
        ],
    )


def _model_status(state: ServerState) -> ModelStatus:
    client = state.client
    return ModelStatus(
        name=state.spec.name,
        names=list(state.model_names),
        model=state.engine_args.model,
        device=client.info.device,
        state="leaving" if state.leaving else client.state.value,
        serving=state.serving,
        restarts=client.restarts,
        failure=client.failure or None,
        created=state.created,
    )
