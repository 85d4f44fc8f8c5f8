"""Which calls the client retries, and after how long. Nothing here does I/O."""

import random
import uuid
from typing import Any

from client.calls import Call
from client.errors import APIError, ConnectionFailed, ConnectionLost, DjinnError

DEFAULT_RETRIES = 2
FIRST_WAIT_S = 0.5
"""Before the first retry, where the server does not say how long; twice as long before the next."""
LONGEST_PAUSE_S = 8.0
"""It grows no further."""
LONGEST_WAIT_S = 30.0
"""The client does not retry if the server asks for a longer wait."""
NOT_DONE = frozenset(
    {
        "moving",
        "draining",
        "replica_away",
        "moving_on",
        "directory_away",
        "connection_limit",
        "bodies_full",
        "journal_unavailable",
        "engine_restarting",
        "engine_stalled",
        "peer_away",
        "peer_full",
    }
)
"""Codes of answers that say that the server did nothing. Status 429 says so too."""
MAYBE_DONE = frozenset({"replica_lost", "fenced", "move_unsettled"})
"""Codes of answers that leave it open. The client retries only what does nothing twice: calls with a key, and reads."""


class Attempts:
    """The attempts of one call. All of them have the same `Idempotency-Key`, if the call takes one. Without
    retries none is sent: the server then cancels the turn when the connection ends.
    """

    def __init__(self, call: Call[Any], max_retries: int) -> None:
        self.key = str(uuid.uuid4()) if call.is_keyed and max_retries else None
        self._is_harmless = self.key is not None or call.method == "GET"
        self._is_told_by_errors = call.asks_state
        self._left = max_retries
        self._wait_s = FIRST_WAIT_S

    def wait_after(self, error: DjinnError) -> float:
        """Seconds until the next attempt. Raises `error` if there is none."""
        wait_s, self._wait_s = self._wait_s * random.uniform(0.75, 1.0), min(2 * self._wait_s, LONGEST_PAUSE_S)
        if isinstance(error, APIError) and error.retry_after is not None:
            wait_s = error.retry_after
        if self._left <= 0 or wait_s > LONGEST_WAIT_S or not self._may_follow(error):
            raise error
        self._left -= 1
        return wait_s

    def _may_follow(self, error: DjinnError) -> bool:
        if isinstance(error, APIError):
            if self._is_told_by_errors:
                return False
            was_not_done = error.status == 429 or error.code in NOT_DONE
            return was_not_done or (self._is_harmless and error.code in MAYBE_DONE)
        return isinstance(error, ConnectionFailed) or (self._is_harmless and isinstance(error, ConnectionLost))
