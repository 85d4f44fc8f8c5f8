"""What the server tells of its journal."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JournalState:
    """`failure` is why the journal cannot be written, None if it can be; `is_full`: because there is no room for it.
    `waiting` counts sessions, vectors and responses with changes that are not in it yet. `epoch` is that of the lease
    of the folder, None without one; `is_fenced`: the lease is not held.
    """

    failure: str | None = None
    is_full: bool = False
    waiting: int = 0
    epoch: int | None = None
    is_fenced: bool = False


NO_JOURNAL = JournalState()
"""A server that keeps nothing has nothing to write."""
