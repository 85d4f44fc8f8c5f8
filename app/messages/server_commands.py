"""Commands about the server as a whole."""

from dataclasses import dataclass

from app.domain.values import Ticket


@dataclass(frozen=True, slots=True)
class Restored:
    """Say that all sessions from before a restart are open: KV files without a session are deleted. Answered by
    `Done(None)`.
    """

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask for the memory map. Answered by `Done(MemoryMap)`."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class FreeDisk:
    """Delete KV files of `count` bytes, as far as there are any that may go. Answered by `Done(None)` when that has
    been ordered.
    """

    ticket: Ticket
    count: int
