"""Work in the background that ends with the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from app.domain.errors import DjinnError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """Background tasks of one event loop. Logs those that fail with anything but a `DjinnError`."""

    def __init__(self) -> None:
        self._running = set[asyncio.Task[Any]]()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start it. The caller may await the task, or drop it."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, DjinnError):
            logger.error("work in the background has failed", exc_info=error)

    async def close(self, within_s: float = 0) -> None:
        """Cancel what has not ended within that many seconds."""
        if within_s and self._running:
            await asyncio.wait(self._running, timeout=within_s)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
