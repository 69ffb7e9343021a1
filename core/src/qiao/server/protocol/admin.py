"""Answers of ``/admin``."""

from __future__ import annotations

from pydantic import BaseModel


class ModelStatus(BaseModel):
    """One model. ``state`` is starting, ready, dead or leaving; ``serving`` counts requests that are being answered."""

    name: str
    names: list[str]
    model: str
    device: str
    state: str
    serving: int
    restarts: int
    failure: str | None
    created: int


class AliasStatus(BaseModel):
    """One alias."""

    name: str
    weights: dict[str, float]
    sticky: list[str]


class FleetStatus(BaseModel):
    """The server: ``loading`` are names of models that are being loaded."""

    models: list[ModelStatus]
    loading: list[str]
    aliases: list[AliasStatus]


class SwapStatus(FleetStatus):
    """The server after a swap. ``dropped_adapters``: those that the new model does not take, each with the reason."""

    dropped_adapters: dict[str, str]
