"""From arguments to a running server, and its orderly end.

The first SIGTERM or SIGINT drains: no new connections or requests, running ones go on for ``shutdown_timeout``
seconds, what is left then gets an error, and the process exits 0. A second signal ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import uvicorn

from qiao.config import EngineArgs
from qiao.engine.request import EngineInfo
from qiao.frontend import Frontend, TextFiles
from qiao.loading.heap import give_back
from qiao.observability.metrics import Metrics
from qiao.server.access import Tenants
from qiao.server.app import create_app
from qiao.server.args import ServerArgs
from qiao.server.auditing import Auditor
from qiao.server.state import ServerState
from qiao.server.upkeep import Upkeep
from qiao.tenants import KeyStore
from qiao.transport import EngineClient, EngineState
from qiao.transport.process import HostOptions, Launched

logger = logging.getLogger(__name__)

T = TypeVar("T")

LAST_WORDS_SECONDS = 2.0
"""After the drain time: how long clients have to receive their error."""


def run(args: EngineArgs, server: ServerArgs, options: HostOptions, listener: socket.socket, engine: Launched) -> int:
    """Serve on ``listener`` with an engine that has been started; see ``qiao.server.start.serve``."""
    return loop_runner()(_Server(args, server, options, listener, engine).run())


def loop_runner() -> Callable[[Coroutine[Any, Any, int]], int]:
    """uvloop's ``run``, which costs a token less; asyncio's own where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


class _Server:
    def __init__(
        self, args: EngineArgs, server: ServerArgs, options: HostOptions, listener: socket.socket, engine: Launched
    ) -> None:
        self._args = args
        self._server_args = server
        self._listener = listener
        self._client = EngineClient(args, options, launched=engine)
        self._state: ServerState | None = None
        self._http: _Uvicorn | None = None
        self._signals = 0
        self._interrupted = asyncio.Event()

    async def run(self) -> int:
        listener = self._listener
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            if not await self._load():
                logger.info("stopped while loading")
                return 0
            state = self._state
            assert state is not None
            upkeep = Upkeep(state.tenants)
            upkeep.start()
            self._http = _Uvicorn(uvicorn_config(state), lambda: summary(state, listener))
            try:
                await self._http.serve(sockets=[listener])
            finally:
                await upkeep.stop()
                if state.auditor is not None:
                    await asyncio.to_thread(state.auditor.log.close)
            return 0 if self._http.started else 1
        finally:
            await self._client.stop()

    async def _load(self) -> bool:
        """Engine and front end together. False when a signal came first."""
        engine = asyncio.create_task(self._client.start())
        # Two processes must not download the same files, so only local ones are read while the engine loads.
        early = in_background(lambda: TextFiles.read(self._args)) if _is_local(self._args) else None
        interrupted = asyncio.create_task(self._interrupted.wait())
        try:
            await asyncio.wait([engine, interrupted], return_when=asyncio.FIRST_COMPLETED)
            if self._signals:
                engine.cancel()
                self._client.kill()
                await asyncio.gather(engine, return_exceptions=True)
                return False
            info = engine.result()
            files = await early if early is not None else None
            frontend = await asyncio.to_thread(Frontend.load, self._args, info, files)
            del files, early
            give_back()
            self._state = make_state(self._client, frontend, self._args, self._server_args, info)
            return not self._signals
        finally:
            interrupted.cancel()

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        self._interrupted.set()
        if self._signals > 1:
            logger.warning("second signal: ending at once")
            self._client.kill()
            os._exit(128 + number)
        if self._state is None or self._http is None:
            return
        timeout = self._server_args.shutdown_timeout
        running = self._state.serving
        logger.info("draining: %d requests have up to %.0f s; a second signal ends at once", running, timeout)
        self._state.draining = True
        self._http.should_exit = True
        asyncio.get_running_loop().call_later(timeout, self._client.fail_running, "the server is shutting down")


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


def _is_local(args: EngineArgs) -> bool:
    return all(Path(name).exists() for name in (args.model, args.tokenizer) if name is not None)


def in_background(work: Callable[[], T]) -> asyncio.Future[T]:
    """``work`` in a thread that does not keep the process from ending, unlike those of ``asyncio.to_thread``."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    done.add_done_callback(lambda future: future.cancelled() or future.exception())  # may never be awaited

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("T", result))

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=run, name="background", daemon=True).start()
    return done


def make_state(
    client: EngineClient, frontend: Frontend, args: EngineArgs, server: ServerArgs, info: EngineInfo
) -> ServerState:
    """The shared state with its metrics."""
    cache = {
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "kv_cache_size_tokens": str(info.kv_tokens),
        "kv_cache_max_concurrency": f"{info.kv_tokens / info.max_model_len:.2f}",
        "enable_prefix_caching": str(args.enable_prefix_caching),
        "cache_dtype": info.kv_cache_dtype or info.dtype,
        "gpu_memory_utilization": str(args.gpu_memory_utilization),
    }
    metrics = Metrics(
        (args.served_model_name or (args.model,))[0],
        client.stats,
        max_model_len=info.max_model_len,
        cache_info=cache,
        engine_up=lambda: float(client.state is EngineState.READY),
        restarts=lambda: float(client.restarts),
    )
    tenants = Tenants(server.api_key, KeyStore(server.keys) if server.keys is not None else None)
    auditor = None
    if server.audit_log is not None:
        auditor = Auditor.open(server.audit_log, server.audit_content, server.audit_redact, server.audit_max_bytes)
    return ServerState(
        client=client,
        frontend=frontend,
        engine_args=args,
        server_args=server,
        metrics=metrics,
        tenants=tenants,
        auditor=auditor,
    )


def uvicorn_config(state: ServerState) -> uvicorn.Config:
    """Uvicorn's settings. Qiao's own access log replaces uvicorn's."""
    server = state.server_args
    return uvicorn.Config(
        create_app(state),
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


def summary(state: ServerState, listener: socket.socket) -> str:
    """The table that is logged when the server is ready. Port 0 shows as the one that the system chose."""
    info, server = state.client.info, state.server_args
    scheme = "https" if server.ssl_certfile else "http"
    host = f"[{server.host}]" if ":" in server.host else server.host
    address = server.uds or f"{scheme}://{host}:{listener.getsockname()[1]}"
    closed = state.tenants.closed
    key = "needed on all routes but /health and /ping" if closed else "none"
    if state.tenants.stored:
        key += f"; {len(state.tenants.names)} tenants in {server.keys}"
    if not closed and server.uds is None and server.host not in ("127.0.0.1", "localhost", "::1"):
        key = "none: anyone who reaches this address can use it (--api-key or --keys closes it)"
    rows = [
        ("model", ", ".join(state.model_names)),
        ("device", f"{info.device}, {info.dtype}"),
        ("context", f"{info.max_model_len} tokens, {info.max_num_seqs} sequences at a time"),
        ("KV cache", info.kv_explanation.removeprefix("KV cache: ")),
        ("fallback", fallback_line(info)),
        ("key", key),
        ("address", address),
    ]
    return "ready\n" + "\n".join(f"  {name:<9} {text}" for name, text in rows)


def fallback_line(info: EngineInfo) -> str:
    """Which operators run on the host though the device is another one."""
    rows = info.plan.get("operators", [])
    lacking = [str(row.get("operator")) for row in rows if isinstance(row, dict) and row.get("policy")]
    return ", ".join(lacking) or "none"
