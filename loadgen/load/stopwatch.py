"""Timing one thing after the other."""

import time


class Stopwatch:
    """Seconds since the lap before, or since it was made."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """How long it has been; the next lap begins."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before
