"""How often the engine may die before the server gives up."""

import time
from collections import deque
from collections.abc import Callable, Iterable

from app.domain.errors import EngineError
from app.messages import Event, TurnFinished

MOST = 5
WITHIN_S = 600.0


class Deaths:
    """Counts the deaths of engines that have finished no turn: what kills them may be there each time."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` tells the time in seconds."""
        self._now = now
        self._times: deque[float] = deque(maxlen=MOST)

    def note_events(self, events: Iterable[Event]) -> None:
        """Look at what an engine has done."""
        if self._times and any(isinstance(event, TurnFinished) for event in events):
            self._times.clear()

    def note(self) -> None:
        """An engine has died. Raises `EngineError` if another would do so too."""
        now = self._now()
        self._times.append(now)
        if len(self._times) == MOST and now - self._times[0] <= WITHIN_S:
            raise EngineError(f"it died {MOST} times within {WITHIN_S / 60:.0f} minutes, and no turn came to its end")
