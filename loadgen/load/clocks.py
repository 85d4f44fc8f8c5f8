"""Timing one thing after the other, and when the parts of an answer arrive."""

import time
from collections.abc import Mapping


class Stopwatch:
    """Seconds since the lap before, or since it was made."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """How long it has been; the next lap begins."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before


SENDING = "http11.send_request_headers.started"
"""httpcore's name of the moment before a request's first bytes go out: https://www.encode.io/httpcore/extensions/."""


class TurnClock:
    """Notes when the parts of a turn's answer arrive, in seconds since the turn's first request went out.

    What this process takes to make the request, to connect, and to get round to sending, is no time of the server's.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._sent = False
        self.token_times_s: list[float] = []
        self.over_s = 0.0

    def sent(self) -> None:
        """A request of the turn goes out. Until the first one does, the clock runs from when it was made."""
        if not self._sent:
            self._sent, self.started = True, time.perf_counter()

    def tokens(self) -> None:
        """An event with tokens is there."""
        self.token_times_s.append(time.perf_counter() - self.started)

    def over(self) -> None:
        """The turn is over."""
        self.over_s = time.perf_counter() - self.started


class Wire:
    """Watches one agent's connections for the clock of the turn that runs."""

    def __init__(self) -> None:
        self.clock: TurnClock | None = None

    async def trace(self, event: str, _info: Mapping[str, object]) -> None:
        """Told by httpcore of each thing that it does."""
        if self.clock is not None and event == SENDING:
            self.clock.sent()
