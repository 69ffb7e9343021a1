"""Load and unload LoRA adapters while the server runs; closed unless the environment allows it, as in vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from qiao.errors import ForbiddenError, NotFoundError, ParameterError
from qiao.lora.request import RUNTIME_VARIABLES
from qiao.server.body import StrictRoute
from qiao.server.call import current_call
from qiao.server.fleet import fleet_of
from qiao.server.protocol.lora import LoadLoraRequest, UnloadLoraRequest
from qiao.server.routes.shared import ERRORS
from qiao.tenants import DEFAULT_TENANT

router = APIRouter(route_class=StrictRoute)

RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    **ERRORS,
}


def updates_allowed(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment opens the routes."""
    return any(environment.get(name, "").strip().lower() in ("1", "true") for name in RUNTIME_VARIABLES)


def _check_allowed() -> None:
    """A path is read with the server's rights, so tenants may not name one; nor may anybody, unless allowed."""
    if not updates_allowed():
        raise NotFoundError(
            f"adapters cannot be changed while this server runs; start it with {RUNTIME_VARIABLES[0]}=1"
        )
    if current_call().tenant.name != DEFAULT_TENANT:
        raise ForbiddenError("a tenant's key may not load or unload adapters; use a key of --api-key")


@router.post("/v1/load_lora_adapter", responses=RESPONSES, response_class=Response)
async def load_adapter(body: LoadLoraRequest, request: Request) -> Response:
    """Load an adapter, which requests then name as their model."""
    fleet = fleet_of(request)
    fleet.check_open()
    _check_allowed()
    for field in ("lora_name", "lora_path"):
        if not getattr(body, field):
            raise ParameterError(field, "must not be empty")
    await fleet.load_adapter(body.lora_name, body.lora_path, body.base_model_name, body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses=RESPONSES, response_class=Response)
async def unload_adapter(body: UnloadLoraRequest, request: Request) -> Response:
    """Forget an adapter; requests that use it go on."""
    _check_allowed()
    fleet_of(request).unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
