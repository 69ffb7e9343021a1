"""All models of one server: which one a request goes to, and how they come and go while it runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fastapi import Request

from qiao.errors import NotFoundError, ParameterError, QiaoError
from qiao.lora.request import LoRARequest
from qiao.observability.metrics import ServerMetrics
from qiao.observability.tracing import Tracing
from qiao.server.access import Tenants
from qiao.server.aliases import Alias
from qiao.server.args import ServerArgs
from qiao.server.auditing import Auditor
from qiao.server.call import Call, current_call
from qiao.server.errors import ApiError
from qiao.server.responses.service import Responses
from qiao.server.setup import ModelSpec
from qiao.server.state import ServerState

logger = logging.getLogger(__name__)

Load = Callable[[ModelSpec], Awaitable[ServerState]]
"""Starts a model's engine and makes its state. Raises a ``QiaoError`` where that fails."""

SESSION_HEADER = "x-session-id"
"""A header by which a client's requests stay with one model of an alias."""

POLL_SECONDS = 0.05
"""How often a model that leaves is looked at."""


@dataclass
class Fleet:
    """The server. ``draining`` refuses new work everywhere; ``loading`` are names of models that are being loaded."""

    server_args: ServerArgs
    tenants: Tenants
    load: Load
    responses: Responses
    auditor: Auditor | None = None
    tracing: Tracing | None = None
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    defaults: Mapping[str, object] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    aliases: dict[str, Alias] = field(default_factory=dict)
    loading: set[str] = field(default_factory=set)
    _states: dict[str, ServerState] = field(default_factory=dict)
    _leaving: list[ServerState] = field(default_factory=list)

    def __iter__(self) -> Iterator[ServerState]:
        """The models that take requests."""
        return iter(self._states.values())

    @property
    def everywhere(self) -> list[ServerState]:
        """All models, those that leave too."""
        return [*self._states.values(), *self._leaving]

    @property
    def serving(self) -> int:
        """Requests that are being answered."""
        return sum(state.serving for state in self.everywhere)

    @property
    def names(self) -> list[str]:
        """Everything that ``model`` may say: the models' names, each with its adapters, then the aliases."""
        return [name for state in self for name in state.model_names] + list(self.aliases)

    @property
    def healthy(self) -> bool:
        """Whether some model takes requests."""
        return not self.draining and any(state.ready for state in self)

    def add(self, state: ServerState) -> None:
        """Serve ``state``, instead of the model that has its name until now."""
        state.tracing = self.tracing
        self._states[state.spec.name] = state
        self.metrics.models[state.spec.name] = state.metrics

    def find(self, name: str) -> ServerState | None:
        """The model of this name, also for the name of one of its adapters."""
        return next((state for state in self if name in state.model_names), None)

    def check_open(self) -> None:
        """Raises 503 while the server drains."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})

    def allowed_names(self) -> list[str]:
        """The names that the caller's key covers."""
        return [name for name in self.names if current_call().tenant.allows(name)]

    def resolve(self, asked: str | None, identities: Mapping[str, str]) -> tuple[ServerState, str]:
        """The model for a request, and the name that its answer carries: that of the model, also under an alias.

        Raises ``NotFoundError`` for a name that is not there, ``ForbiddenError`` for one that the key does not cover.
        """
        if asked is None:
            asked = next((name for name in self.names), "")
        alias, name = self.aliases.get(asked), asked
        if alias is not None:
            there = {name for state in self for name in state.model_names}
            name = alias.choose(identities, there) or ""
        state = self.find(name)
        if state is None:
            if alias is not None:
                raise NotFoundError(f"none of the models of the alias {asked!r} is loaded: {', '.join(alias.weights)}")
            served = ", ".join(self.allowed_names()) or "none at the moment"
            raise NotFoundError(f"the model {asked[:200]!r} does not exist; this server has {served}")
        call = current_call()
        call.model, call.alias = name, asked if alias is not None else ""
        adapter = state.adapter(name)
        call.adapter = 0 if adapter is None else adapter.lora_int_id
        call.check_model(asked)
        return state, name

    def refused(self, call: Call, reason: str) -> None:
        """Count a refusal by a tenant's limits under the model that it was for."""
        state = self.find(call.model) or next(iter(self), None)
        if state is not None:
            state.metrics.tenant_refused(call.tenant.name, reason)

    async def start(self, spec: ModelSpec) -> None:
        """Load a model and serve it. Raises ``ApiError`` 409 for a name that is taken, and what the engine raises."""
        self._reserve(spec)
        try:
            state = await self.load(spec)
        finally:
            self.loading -= set(spec.all_names)
        if self.draining:
            await state.close()
            self.check_open()
        self.add(state)
        logger.info("%s is loaded", spec.name)

    def _reserve(self, spec: ModelSpec, but: ServerState | None = None) -> None:
        self.check_open()
        taken = {*self.aliases, *self.loading, *(n for state in self if state is not but for n in state.model_names)}
        for name in spec.all_names:
            if name in taken:
                raise ApiError(409, f"the name {name!r} is taken", param="name", code="name_taken")
        self.loading |= set(spec.all_names)

    async def swap(self, spec: ModelSpec, timeout: float) -> dict[str, str]:
        """Load ``spec`` beside the model of its first name, give it the new requests, and end the old one.

        What runs on the old one goes on for ``timeout`` seconds. Both need to fit meanwhile. Where the new one does not
        load the old one stays. LoRA adapters that were loaded since the old one's start are loaded for the new one too;
        returns those that it does not take, each with the reason. Raises as ``start``, and ``NotFoundError``.
        """
        old = self._own(spec.name)
        self._reserve(spec, old)
        try:
            state = await self.load(spec)
            dropped = await _hand_over(old, state)
        finally:
            self.loading -= set(spec.all_names)
        if self.draining or self._states.get(spec.name) is not old:
            await state.close()
            raise ApiError(409, f"the model {spec.name!r} went while its successor was loaded", code="model_gone")
        self.add(state)
        logger.info("%s is swapped", spec.name)
        for name, why in dropped.items():
            logger.warning("the adapter %s did not come along: %s", name, why)
        await self._end(old, timeout)
        return dropped

    async def stop(self, name: str, timeout: float) -> None:
        """Stop serving a model: no new requests; what runs has ``timeout`` seconds. Raises ``NotFoundError``."""
        state = self._own(name)
        del self._states[name]
        del self.metrics.models[name]
        await self._end(state, timeout)
        logger.info("%s is unloaded", name)

    def _own(self, name: str) -> ServerState:
        state = self._states.get(name)
        if state is None:
            raise NotFoundError(f"the model {name[:200]!r} is not loaded; loaded are {', '.join(self._states)}")
        return state

    async def _end(self, state: ServerState, timeout: float) -> None:
        state.leaving = True
        self._leaving.append(state)
        try:
            end = time.monotonic() + timeout
            while (state.held or state.serving) and time.monotonic() < end:
                await asyncio.sleep(POLL_SECONDS)
            state.client.fail_running("the model was unloaded before this answer was complete")
            await state.close()
        finally:
            self._leaving.remove(state)

    async def load_adapter(self, name: str, path: str, base: str | None, replace: bool) -> None:
        """Load a LoRA adapter for the model ``base``. Raises ``ParameterError``, and what ``Adapters.load`` does."""
        state = self._base(base)
        there = self.find(name)
        mine = there is state and name not in state.spec.names
        if name in self.aliases or name in self.loading or (there is not None and not mine):
            raise ParameterError("lora_name", f"{name!r} is the name of something else on this server")
        self.loading.add(name)
        try:
            await state.client.adapters.load(name, path, base, replace=replace)
        finally:
            self.loading.discard(name)
        if self._states.get(state.spec.name) is not state:
            raise ApiError(409, f"{state.spec.name!r} was swapped or unloaded meanwhile; try again", code="model_gone")

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; requests that use it go on. Raises ``NotFoundError`` and ``ParameterError``."""
        self._takers()
        state = next((state for state in self if state.adapter(name) is not None), None)
        if state is None:
            raise NotFoundError(f"the adapter {name[:200]!r} cannot be found")
        state.client.adapters.unload(name)

    def _base(self, name: str | None) -> ServerState:
        """The model that a new adapter is for: the one of that name, else the only one that takes adapters."""
        able = self._takers()
        named = next((state for state in self if name in state.spec.names), None)
        if named is not None and named not in able:
            raise ParameterError("base_model_name", f"{named.spec.name!r} was started without --enable-lora")
        if named is None and len(able) > 1:
            served = ", ".join(state.spec.name for state in able)
            raise ParameterError("base_model_name", f"must say which model the adapter is for: {served}")
        return able[0] if named is None else named

    def _takers(self) -> list[ServerState]:
        """The models that take adapters. Raises ``ParameterError`` where there is none."""
        able = [state for state in self if state.engine_args.enable_lora]
        if not able:
            raise ParameterError("lora_name", "this server was started without --enable-lora")
        return able

    def set_alias(self, alias: Alias) -> None:
        """Add or change an alias. Raises ``ParameterError`` where its models are not there, 409 for a model's name."""
        if self.find(alias.name) is not None or alias.name in self.loading:
            raise ApiError(409, f"{alias.name!r} is the name of a model", param="name", code="name_taken")
        for name in alias.weights:
            if self.find(name) is None:
                raise ParameterError(f"weights.{name}", "is no model of this server")
        self.aliases[alias.name] = alias

    def fail_running(self, why: str) -> None:
        """End every running request with an error that says ``why``."""
        for state in self.everywhere:
            state.client.fail_running(why)

    async def close(self) -> None:
        """End all engines."""
        await asyncio.gather(*(state.close() for state in self.everywhere))


async def _hand_over(old: ServerState, new: ServerState) -> dict[str, str]:
    """Load for ``new`` what was loaded for ``old`` while it ran. Returns what cannot be, each with the reason.

    Adapters that come or go on ``old`` meanwhile do so here too: at the return both have the same.
    """
    carried: dict[str, LoRARequest] = {}
    dropped: dict[str, str] = {}
    while True:
        there = {one.lora_name: one for one in old.client.adapters.added}
        for name in [name for name, one in carried.items() if there.get(name) != one]:
            del carried[name]
            new.client.adapters.unload(name)
        one = next((one for name, one in there.items() if name not in carried and name not in dropped), None)
        if one is None:
            return {name: why for name, why in dropped.items() if name in there}
        if not new.engine_args.enable_lora:
            dropped[one.lora_name] = "the new model was started without --enable-lora"
        elif one.lora_name in new.model_names:
            dropped[one.lora_name] = "the new model has this name for something else"
        else:
            try:
                await new.client.adapters.load(one.lora_name, one.lora_path, one.base_model_name)
                carried[one.lora_name] = one
            except QiaoError as error:
                dropped[one.lora_name] = str(error)


def fleet_of(request: Request) -> Fleet:
    """The server, for a route."""
    fleet = request.app.state.qiao
    assert isinstance(fleet, Fleet)
    return fleet


def open_model(request: Request, name: str | None, user: str | None = None) -> tuple[ServerState, str]:
    """The model for a request that asks for ``name``, and the name that answers carry; it stays until the answer's end.

    ``user`` is the body's. Raises as ``Fleet.resolve`` and ``Fleet.check_open``, and ``ParameterError`` for an
    ``X-Priority`` that the model's engine does not know.
    """
    fleet, call = fleet_of(request), current_call()
    fleet.check_open()
    tenant = call.tenant.name if fleet.tenants.stored else ""
    session = request.headers.get(SESSION_HEADER, "")
    state, served = fleet.resolve(name, {"session": session, "user": user or "", "tenant": tenant})
    if call.priority and state.engine_args.scheduling_policy != "priority":
        raise ParameterError("X-Priority", "needs a server started with --scheduling-policy priority")
    state.hold()
    return state, served
