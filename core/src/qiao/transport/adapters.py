"""The LoRA adapters of one model, as its front end sees them: what is loaded, and that each engine has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from qiao.errors import EngineDeadError, NotFoundError, ParameterError, QiaoError
from qiao.lora.request import LoRARequest
from qiao.transport.client import EngineClient, EngineState

logger = logging.getLogger(__name__)


class Adapters:
    """Loaded adapters by name, ``first`` from the start, for all ``engines``.

    An engine that becomes ready is sent all of them ahead of its first request; those that it was built with are the
    same to it and cost nothing. An engine that cannot load one is sent no requests for it, and an adapter that no
    engine can load is dropped with a log line, since the rest can be served. Numbers are never used twice.
    """

    def __init__(self, engines: Sequence[EngineClient], first: Iterable[LoRARequest] = ()) -> None:
        self._engines = engines
        self._first = tuple(first)
        self._loaded = {one.lora_name: one for one in self._first}
        self._last = max((one.lora_int_id for one in self._first), default=0)
        self._lacking: dict[EngineClient, set[int]] = {engine: set() for engine in engines}
        self._restoring: dict[EngineClient, list[asyncio.Future[None]]] = {}
        for engine in engines:
            engine.on_ready = partial(self._restore, engine)

    @property
    def loaded(self) -> Mapping[str, LoRARequest]:
        """By name."""
        return MappingProxyType(self._loaded)

    @property
    def added(self) -> list[LoRARequest]:
        """Those that were loaded since the start, and are there."""
        return [one for one in self._loaded.values() if one not in self._first]

    def lacks(self, engine: EngineClient, number: int) -> bool:
        """Whether ``engine`` could not load the adapter ``number``."""
        return number in self._lacking[engine]

    async def load(self, name: str, path: str, base_model_name: str | None = None, *, replace: bool = False) -> None:
        """Load an adapter in all engines; with ``replace`` in place of one of that name, whose requests go on with it.

        Raises ``ParameterError`` where the name is taken, ``ModelError`` for files that an engine does not find or
        take, ``EngineDeadError`` where no engine has loaded it.
        """
        self._check_free(name, replace)
        self._last += 1
        made = LoRARequest(name, self._last, path, base_model_name)
        try:
            await self._load_everywhere(made)
            self._check_free(name, replace)  # somebody else may have been faster
        except BaseException:
            self._drop(made)
            raise
        old = self._loaded.get(name)
        self._loaded[name] = made
        if old is not None:
            self._drop(old)

    async def _load_everywhere(self, made: LoRARequest) -> None:
        able = {engine: engine.restarts for engine in self._engines if engine.state is EngineState.READY}
        results = await asyncio.gather(*(engine.load_adapter(made) for engine in able), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineDeadError):
                raise result
        if all(isinstance(result, EngineDeadError) for result in results):
            raise EngineDeadError("no engine is ready to load an adapter; try again in a moment")
        for engine in self._engines:  # those that became ready meanwhile have not been sent it
            if able.get(engine) != engine.restarts:
                self._send(engine, made)

    def _check_free(self, name: str, replace: bool) -> None:
        if name in self._loaded and not replace:
            raise ParameterError(
                "lora_name", f"the adapter {name!r} has been loaded already; unload it first, or set load_inplace"
            )

    def _drop(self, adapter: LoRARequest) -> None:
        for engine in self._engines:
            engine.drop_adapter(adapter.lora_int_id)
            self._lacking[engine].discard(adapter.lora_int_id)

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that use it go on. Raises ``NotFoundError``."""
        known = self._loaded.pop(name, None)
        if known is None:
            raise NotFoundError(f"the adapter {name[:200]!r} cannot be found")
        self._drop(known)

    def _restore(self, engine: EngineClient) -> None:
        """``engine`` is ready: bring it from the adapters of the start, which it may have, to those of now."""
        self._lacking[engine].clear()
        for one in self._first:
            if self._loaded.get(one.lora_name) != one:
                engine.drop_adapter(one.lora_int_id)
        self._restoring[engine] = [self._send(engine, one) for one in self._loaded.values()]

    def _send(self, engine: EngineClient, one: LoRARequest) -> asyncio.Future[None]:
        """Load one that others have, or are about to have."""
        future = engine.load_adapter(one)
        future.add_done_callback(partial(self._sent, engine, one))
        return future

    def _sent(self, engine: EngineClient, one: LoRARequest, future: asyncio.Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is None or isinstance(error, EngineDeadError):
            return
        logger.error("an engine cannot load the adapter %s: %s", one.lora_name, error)
        self._lacking[engine].add(one.lora_int_id)
        known = self._loaded.get(one.lora_name) == one
        if known and all(one.lora_int_id in lacking for lacking in self._lacking.values()):
            del self._loaded[one.lora_name]

    async def restored(self) -> None:
        """Wait until the engines that are ready have the adapters of the start. Raises why one cannot have one."""
        for future in [one for futures in self._restoring.values() for one in futures]:
            try:
                await asyncio.shield(future)
            except EngineDeadError:  # it gets them when it is back
                continue
            except QiaoError as error:
                raise ParameterError("lora_modules", str(error)) from error
