"""What a start says while it compiles kernels: the first one on a machine is silent for a minute or two otherwise."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from app.machine.units import counted

logger = logging.getLogger(__name__)


class Compilations:
    """Those of one process. A kernel that comes from the cache is none."""

    def __init__(self) -> None:
        self._is_told = False
        self._kernels = 0
        self._seconds = 0.0

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Within this context, log before the first kernel is compiled. At its end, log how long all of them took."""
        self._is_told, self._kernels, self._seconds = True, 0, 0.0
        try:
            yield
        finally:
            self._is_told = False
            if self._kernels:
                logger.info("compiled %s in %.0f s", counted(self._kernels, "kernel"), self._seconds)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A kernel is compiled within this context."""
        if self._is_told and not self._kernels:
            logger.info("compiling kernels for this processor: it takes a minute or two, the first time")
        began = time.perf_counter()
        yield
        self._kernels += 1
        self._seconds += time.perf_counter() - began


COMPILATIONS = Compilations()
