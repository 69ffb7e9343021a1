"""``/v1/models`` and the small routes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelPermission(BaseModel):
    """Old OpenAI field that vLLM's clients read."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(BaseModel):
    """One served name. ``root`` is what was loaded, ``max_model_len`` in tokens; a LoRA adapter has a ``parent``."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "qiao"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission] = []


class ModelList(BaseModel):
    """All served names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    """The server's version."""

    version: str


class Load(BaseModel):
    """Requests that are being answered."""

    server_load: int
