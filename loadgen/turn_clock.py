"""When the parts of an answer arrive."""

from __future__ import annotations

import time


class TurnClock:
    """Notes when the parts of a turn's answer arrive, in seconds since it was made, which is when the turn was sent."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.token_times_s: list[float] = []
        self.over_s = 0.0

    def tokens(self) -> None:
        """An event with tokens is there."""
        self.token_times_s.append(time.perf_counter() - self._started)

    def over(self) -> None:
        """The turn is over."""
        self.over_s = time.perf_counter() - self._started
