"""From arguments to a running server, and its orderly end.

The first SIGTERM, SIGINT or SIGHUP (where it reads no keys again) drains: no new connections or requests, running ones
go on for ``shutdown_timeout`` seconds, what is left then gets an error, and the process exits 0. A second signal ends
everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from qiao.engine.request import EngineInfo
from qiao.loading.heap import bound_heap
from qiao.server.aliases import Alias
from qiao.server.app import create_app
from qiao.server.connections import Seldom, timed_protocol
from qiao.server.fleet import Fleet
from qiao.server.loader import Loader, make_fleet
from qiao.server.setup import Setup
from qiao.server.start import free_after_end
from qiao.server.state import ServerState
from qiao.server.upkeep import Upkeep
from qiao.transport.orphan import end_signals
from qiao.transport.process import HostOptions, Launched

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 2.0
"""After the drain time: how long clients have to receive their error."""


def run(setup: Setup, options: HostOptions, listener: socket.socket, engine: Launched | None) -> int:
    """Serve on ``listener``; the first local ``engine`` has been started. See ``qiao.server.start.serve``."""
    bound_heap()
    return loop_runner()(_Server(setup, options, listener, engine).run())


def loop_runner() -> Callable[[Coroutine[Any, Any, int]], int]:
    """uvloop's ``run``, which costs a token less; asyncio's own where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


class _Server:
    def __init__(self, setup: Setup, options: HostOptions, listener: socket.socket, engine: Launched | None) -> None:
        self._setup = setup
        self._listener = listener
        self._loader = Loader(options, engine)
        self._fleet = make_fleet(setup, self._loader.load)
        self._http: _Uvicorn | None = None
        self._signals = 0
        self._interrupted = asyncio.Event()

    async def run(self) -> int:
        listener, fleet = self._listener, self._fleet
        loop = asyncio.get_running_loop()
        for number in end_signals():
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            if not await self._load():
                logger.info("stopped while loading")
                return 0
            upkeep = Upkeep(fleet.tenants)
            upkeep.start()
            free_after_end(listener)
            self._http = _Uvicorn(uvicorn_config(fleet), lambda: summary(fleet, listener))
            try:
                await self._http.serve(sockets=[listener])
            finally:
                await fleet.responses.close()
                await upkeep.stop()
                if fleet.auditor is not None:
                    await asyncio.to_thread(fleet.auditor.log.close)
                if fleet.tracing is not None:
                    await asyncio.to_thread(fleet.tracing.close)
            return 0 if self._http.started else 1
        finally:
            await fleet.close()

    async def _load(self) -> bool:
        """All models. False when a signal came first."""
        loading = asyncio.create_task(self._load_all())
        interrupted = asyncio.create_task(self._interrupted.wait())
        try:
            await asyncio.wait([loading, interrupted], return_when=asyncio.FIRST_COMPLETED)
            if self._signals:
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
                return False
            loading.result()
            return not self._signals
        finally:
            interrupted.cancel()

    async def _load_all(self) -> None:
        for spec in self._setup.models:
            await self._fleet.start(spec)

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        self._interrupted.set()
        fleet = self._fleet
        if self._signals > 1:
            logger.warning("second signal: ending at once")
            self._loader.kill()
            for state in fleet.everywhere:
                state.client.kill()
            os._exit(128 + number)
        if self._http is None:
            return
        timeout = self._setup.server.shutdown_timeout
        logger.info("draining: %d requests have up to %.0f s; a second signal ends at once", fleet.serving, timeout)
        fleet.draining = True
        self._loader.kill()
        self._http.should_exit = True
        asyncio.get_running_loop().call_later(timeout, fleet.fail_running, "the server is shutting down")


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handling, which is done above. Logs ``ready()`` once connections are taken."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], str]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            logger.info("%s", self._ready())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_config(fleet: Fleet) -> uvicorn.Config:
    """Uvicorn's settings. Qiao's own access log replaces uvicorn's."""
    server = fleet.server_args
    log = logging.getLogger("uvicorn.error")
    log.filters[:] = [one for one in log.filters if not isinstance(one, Seldom)] + [Seldom()]
    return uvicorn.Config(
        create_app(fleet),
        http=timed_protocol(server.request_read_timeout),
        access_log=False,
        log_config=None,
        server_header=False,
        lifespan="off",
        ws="none",
        h11_max_incomplete_event_size=64 * 1024,
        timeout_graceful_shutdown=int(server.shutdown_timeout + LAST_WORDS_SECONDS) + 1,
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
        ssl_ca_certs=server.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if server.ssl_ca_certs else ssl.CERT_NONE,
    )


def summary(fleet: Fleet, listener: socket.socket) -> str:
    """The table that is logged when the server is ready. Port 0 shows as the one that the system chose."""
    server = fleet.server_args
    scheme = "https" if server.ssl_certfile else "http"
    host = f"[{server.host}]" if ":" in server.host else server.host
    address = server.uds or f"{scheme}://{host}:{listener.getsockname()[1]}"
    closed = fleet.tenants.closed
    key = "needed on all routes but /health and /ping" if closed else "none"
    if fleet.tenants.stored:
        key += f"; {len(fleet.tenants.names)} tenants in {server.keys}"
    if not closed and server.uds is None and server.host not in ("127.0.0.1", "localhost", "::1"):
        key = "none: anyone who reaches this address can use it (--api-key or --keys closes it)"
    rows = [row for state in fleet for row in _about(state)]
    if fleet.aliases:
        rows.append(("aliases", "; ".join(map(_alias_text, fleet.aliases.values()))))
    rows += [("key", key), ("address", address)]
    return "ready\n" + "\n".join(f"  {name:<9} {text}" for name, text in rows)


def _about(state: ServerState) -> list[tuple[str, str]]:
    info = state.client.info
    return [
        ("model", ", ".join(state.model_names)),
        ("device", f"{info.device}, {info.dtype}"),
        ("context", f"{info.max_model_len} tokens, {info.max_num_seqs} sequences at a time"),
        ("KV cache", info.kv_explanation.removeprefix("KV cache: ")),
        ("fallback", fallback_line(info)),
    ]


def _alias_text(alias: Alias) -> str:
    total = sum(alias.weights.values())
    return f"{alias.name} = " + " + ".join(f"{weight / total:.1%} {name}" for name, weight in alias.weights.items())


def fallback_line(info: EngineInfo) -> str:
    """Which operators run on the host though the device is another one."""
    rows = info.plan.get("operators", [])
    lacking = [str(row.get("operator")) for row in rows if isinstance(row, dict) and row.get("policy")]
    return ", ".join(lacking) or "none"
