"""Sessions that are on their way, by requests for moves that pass here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATIENCE_S = 5.0
"""How long a request waits for a session that moves. Then its old home refuses it, and the client tries again."""


class Moves:
    """Has requests for a session wait while it moves: they could only be refused, or followed to the new home.

    Used on the event loop only.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Event] = {}

    @contextmanager
    def under_way(self, session_id: str) -> Iterator[None]:
        """The session moves while the block runs."""
        over = self._under_way[session_id] = asyncio.Event()
        try:
            yield
        finally:
            if self._under_way.get(session_id) is over:
                del self._under_way[session_id]
            over.set()

    def end(self, session_id: str) -> None:
        """It moves no more, though the block still runs: whoever waits does not wait for a slow client too."""
        over = self._under_way.pop(session_id, None)
        if over is not None:
            over.set()

    async def over(self, session_id: str) -> None:
        """Wait until the session does not move, or for as long as may be."""
        over = self._under_way.get(session_id)
        if over is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await over.wait()
