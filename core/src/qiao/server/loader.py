"""From what is to be served to what serves it: a model's engine and text side, and the server around them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from qiao.config import EngineArgs
from qiao.engine.request import EngineInfo
from qiao.errors import ParameterError
from qiao.frontend import Frontend, TextFiles
from qiao.loading.heap import give_back
from qiao.lora.request import parse_modules
from qiao.observability.metrics import Metrics
from qiao.observability.tracing import Tracing
from qiao.server.access import Tenants
from qiao.server.args import ServerArgs
from qiao.server.auditing import Auditor
from qiao.server.fleet import Fleet, Load
from qiao.server.responses.service import Responses
from qiao.server.responses.store import OFF, Bounds, ResponseStore
from qiao.server.setup import ModelSpec, Setup
from qiao.server.state import ServerState
from qiao.tenants import KeyStore
from qiao.transport import EngineClient, EnginePool, EngineState
from qiao.transport.client import Source
from qiao.transport.process import HostOptions, Launched, LocalSource

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Loader:
    """Loads one model after the other, so that each finds the memory that the ones before have left.

    ``launched`` is the engine of the first one, where it has been started before.
    """

    def __init__(self, options: HostOptions, launched: Launched | None = None) -> None:
        self._options = options
        self._launched = launched
        self._turn = asyncio.Lock()
        self._loading: EnginePool | None = None

    def kill(self) -> None:
        """End the engine that is being loaded at once."""
        if self._loading is not None:
            self._loading.kill()

    def _pool(self, spec: ModelSpec, launched: Launched | None) -> EnginePool:
        sources: list[Source]
        if not spec.server.engine:
            sources = [LocalSource(spec.engine, self._options, launched)]
        else:
            from qiao.transport.remote import RemoteSource  # brings ZeroMQ

            assert spec.server.engine_keys is not None, "checked with the arguments"
            keys = Path(spec.server.engine_keys)
            sources = [RemoteSource(address, keys) for address in spec.server.engine]
        return EnginePool(
            [EngineClient(source) for source in sources],
            parse_modules(spec.engine.lora_modules),
            patience=spec.server.engine_wait,
            max_waiting=spec.engine.max_num_queued_reqs,
        )

    async def load(self, spec: ModelSpec) -> ServerState:
        """Start the engine, read the text side meanwhile. Raises a ``QiaoError`` where the model cannot be served."""
        async with self._turn:
            launched = None
            if not spec.server.engine:
                launched, self._launched = self._launched, None
            client = self._loading = self._pool(spec, launched)
            try:
                return await _loaded(client, spec)
            except BaseException as error:
                client.kill()
                await client.stop()
                if isinstance(error, ParameterError) and spec.where:
                    raise ParameterError(f"{spec.where}.{error.field.removeprefix('--')}", error.detail) from error
                raise
            finally:
                self._loading = None


async def _loaded(client: EnginePool, spec: ModelSpec) -> ServerState:
    engine = asyncio.create_task(client.start())
    # Two processes must not download the same files, so only local ones are read while the engine loads.
    early = in_background(lambda: TextFiles.read(spec.engine)) if _is_local(spec.engine) else None
    try:
        info = await engine
        files = await early if early is not None else None
        frontend = await asyncio.to_thread(Frontend.load, spec.engine, info, files)
        del files, early
        give_back()
        return make_state(client, frontend, spec, info)
    finally:
        engine.cancel()


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


def make_state(client: EnginePool, frontend: Frontend, spec: ModelSpec, info: EngineInfo) -> ServerState:
    """A model's state with its metrics."""
    args = spec.engine
    kept = bool(args.kv_offloading_size or args.kv_offloading_path)
    host = int((args.kv_offloading_size or 0.0) * 2**30)
    cache = {
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "kv_cache_size_tokens": str(info.kv_tokens),
        "kv_cache_max_concurrency": f"{info.kv_tokens / info.max_model_len:.2f}",
        "enable_prefix_caching": str(args.enable_prefix_caching),
        "cache_dtype": info.kv_cache_dtype or info.dtype,
        "gpu_memory_utilization": str(args.gpu_memory_utilization),
        "prefix_caching_hash_algo": "sha256" if args.enable_prefix_caching else "None",
        "num_cpu_blocks": str(host // info.kv_block_bytes if info.kv_block_bytes else 0),
        "kv_offloading_backend": "native" if kept else "None",
        "kv_offloading_size": str(args.kv_offloading_size),
    }
    metrics = Metrics(
        spec.name,
        lambda: [engine.stats() for engine in client.engines],
        max_model_len=info.max_model_len,
        cache_info=cache,
        max_loras=args.max_loras,
        engine_up=lambda: float(sum(engine.state is EngineState.READY for engine in client.engines)),
        restarts=lambda: float(client.restarts),
        waiting=lambda: float(client.waiting),
    )
    return ServerState(client=client, frontend=frontend, spec=spec, metrics=metrics)


def make_fleet(setup: Setup, load: Load) -> Fleet:
    """The server without its models."""
    server = setup.server
    tenants = Tenants(server.api_key, KeyStore(server.keys) if server.keys is not None else None)
    auditor = None
    if server.audit_log is not None:
        auditor = Auditor.open(server.audit_log, server.audit_content, server.audit_redact, server.audit_max_bytes)
    aliases = {alias.name: alias for alias in setup.aliases}
    responses = Responses(response_store(server))
    tracing = None if server.otlp_traces_endpoint is None else Tracing.open(server.otlp_traces_endpoint)
    return Fleet(server, tenants, load, responses, auditor, tracing, aliases=aliases, defaults=setup.defaults)


def response_store(server: ServerArgs) -> ResponseStore | None:
    """Where responses are kept; None where they are not. Raises ``ParameterError``."""
    if server.responses_db == OFF:
        return None
    bounds = Bounds(server.responses_max_count, server.responses_max_age, server.responses_max_bytes)
    return ResponseStore(server.responses_db, bounds)
