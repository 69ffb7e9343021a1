"""What a server does beside answering: writing the day's tokens, and reading the keys again on SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

from qiao.errors import QiaoError
from qiao.server.access import Tenants

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
"""How often new tokens are written; a server that is killed loses at most so many seconds of them."""


class Upkeep:
    """Runs beside one server whose keys are in a file; without one it has nothing to do."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._tasks: set[asyncio.Task[None]] = set()
        self._failing = False

    def start(self) -> None:
        """Begin, in the running loop."""
        if self._tenants.stored:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
            self._spawn(self._flush_often())

    async def stop(self) -> None:
        """Write what is left. Nothing is counted after this."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._flush()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_hangup(self) -> None:
        self._spawn(self.reload())

    async def reload(self) -> None:
        """Read the file again. One that cannot be read changes nothing, and the log says why."""
        try:
            ring = await asyncio.to_thread(self._tenants.read)
        except QiaoError as error:
            logger.error("the keys stay as they were: %s", error)
            return
        self._tenants.use(ring)
        if ring is not None:
            logger.info("keys read again: %d tenants, %d keys", len(ring.tenants), len(ring.keys))

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self._flush()

    async def _flush(self) -> None:
        try:
            await asyncio.shield(asyncio.to_thread(self._tenants.usage.flush))
            self._failing = False
        except QiaoError as error:
            if not self._failing:  # once, not twice a second
                logger.error("the day's tokens cannot be written and are kept in memory: %s", error)
            self._failing = True
