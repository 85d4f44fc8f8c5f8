"""Commands about the server as a whole."""

from dataclasses import dataclass

from app.domain.values import SessionId, Ticket


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


@dataclass(frozen=True, slots=True)
class KeepKV:
    """Write the KV of `sessions` to disk, the first ones first, as far as there is room and `within_s` seconds: the
    engine is about to stop. Those with a turn follow when it is over. Answered by `Done(KeptKV)`.
    """

    ticket: Ticket
    sessions: tuple[SessionId, ...]
    within_s: float


ServerCommand = Restored | Inspect | FreeDisk | KeepKV
