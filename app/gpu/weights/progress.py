"""Telling the operator how far it is with what takes long."""

from __future__ import annotations

import logging
import time

from app.gpu.zeroed import PROGRESS_SECONDS
from app.machine.units import size

logger = logging.getLogger(__name__)


class Progress:
    """Logs, every few seconds, how many of `total` bytes are done; of short work, nothing."""

    def __init__(self, done: str, total: int) -> None:
        """`done` is what has been done with them: "written"."""
        self._what = done
        self._total = total
        self._done = 0
        self._told = time.perf_counter()

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._done += nbytes
        if time.perf_counter() - self._told > PROGRESS_SECONDS:
            self._told = time.perf_counter()
            logger.info("%s %s of %s of weights", self._what, size(self._done), size(self._total))
