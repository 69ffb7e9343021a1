"""A host that has engines and no HTTP: what ``qiao engine`` runs until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from qiao.config import EngineArgs
from qiao.devices import check_device_name
from qiao.errors import ParameterError
from qiao.observability.logs import configure_logging
from qiao.transport import EngineClient
from qiao.transport.curve import EngineKeys
from qiao.transport.orphan import end_signals
from qiao.transport.priority import run_when_idle
from qiao.transport.process import HostOptions, LocalSource
from qiao.transport.remote import check_address
from qiao.transport.service import EngineService, serve_until

logger = logging.getLogger(__name__)


def host_engine(
    args: EngineArgs, address: str, keys: Path, timeout: float, log_level: str, options: HostOptions | None = None
) -> int:
    """Load the model, serve it at ``address``, and return the exit status once a signal has ended it.

    The first SIGTERM, SIGINT or SIGHUP drains for ``timeout`` seconds, a second one ends everything at once. Raises a
    ``QiaoError`` where the engine cannot start.
    """
    configure_logging(log_level)
    check_device_name(args.device)
    check_address("--listen", address)
    if args.lora_modules:
        raise ParameterError("--lora-modules", "is for front ends, which name adapters to their engines; leave it out")
    known = EngineKeys.read(keys)
    run_when_idle()
    return asyncio.run(_host(args, address, known, timeout, options or HostOptions(log_level=log_level)))


async def _host(args: EngineArgs, address: str, keys: EngineKeys, timeout: float, options: HostOptions) -> int:
    client, stop = EngineClient(LocalSource(args, options)), asyncio.Event()
    service = EngineService(client, address, keys)  # before loading: an address in use should not cost minutes

    def on_signal(number: int) -> None:
        if stop.is_set():
            client.kill()
            os._exit(128 + number)
        stop.set()

    for number in end_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    loading, ended = asyncio.create_task(client.start()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([loading, ended], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            logger.info("stopped while loading")
            client.kill()
            await asyncio.gather(loading, return_exceptions=True)
            return 0
        info = loading.result()
        rows = [("model", args.model), ("device", f"{info.device}, {info.dtype}"), ("address", service.address)]
        logger.info("ready\n%s", "\n".join(f"  {name:<9} {text}" for name, text in rows))
        await serve_until(service, stop, timeout)
    finally:
        ended.cancel()
        await client.stop()
        service.close()
    return 0
