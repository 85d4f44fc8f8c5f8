"""How much one owner of sessions may use, and who knows that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_LABEL_BYTES = 192 << 20
"""Of what the file of an exported session says beside its history and KV, as JSON: 64 MiB of tensors of the session's
edits, and as many others of its paused turn, have 171 MiB in base64. 21 MiB are left for metadata, breakpoints, the
checkpoint and log-probabilities.
"""

MAX_NAME = 256
"""Characters of a name that a caller gives a session."""


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit but the server's."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    turns_at_once: int | None = None
    """Turns that wait, run or are paused."""
    sessions: int | None = None
    guaranteed_sessions: int | None = None
    import_bytes: int | None = None
    device_bytes: int | None = None
    """KV of the contexts of turns that wait, run or are paused."""
    host_bytes: int | None = None
    """KV in host memory."""


NO_LIMITS = Limits()

Settle = Callable[[int], None]
"""Takes how many of the reserved tokens were used, once, when that is known."""


class Quotas(Protocol):
    """What the owners of sessions may use, as the sessions ask for it. Used on the event loop only."""

    def limits(self, owner: str | None) -> Limits:
        """What the owner may use."""
        ...

    def reserve(self, owner: str | None, tokens: Sequence[int]) -> list[Settle]:
        """Count the tokens of each turn before it is known how many they will be: those of all turns, or none.

        Raises `RateLimited`, but not for 0 tokens.
        """
        ...
