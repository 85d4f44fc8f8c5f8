"""Sessions that leave the device, so that nothing of them is left there, and come back."""

from dataclasses import dataclass
from random import Random

from app.domain.values import Phase, SessionId, Tier
from benchmarks.engine.live import LiveEngine
from loadgen.errors import NotAsMeant

BYTES = 256
"""Tokens that every byte-level vocabulary has."""
WHOLE = 0.9
"""Share of a session's KV that must have moved for it to have been away."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A move as the client sees it: from its signal to the news that the KV is there."""

    seconds: float
    bytes: int

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second."""
        return self.bytes / self.seconds / 1e9


def random_tokens(random: Random, count: int) -> list[int]:
    """A text that no other session has."""
    return [random.randrange(BYTES) for _ in range(count)]


def park(live: LiveEngine, session: SessionId) -> Moved:
    """Signal `io_wait`, and wait until the KV has left the device."""
    before = live.place(session).bytes_out
    said = live.set_phase(session, Phase.IO_WAIT)
    there = live.wait_for_tier(session, Tier.HOST)
    return Moved(there - said, live.place(session).bytes_out - before)


def fetch(live: LiveEngine, session: SessionId) -> Moved:
    """Signal `ready`, and wait until the KV is back on the device."""
    before = live.place(session).bytes_in
    said = live.set_phase(session, Phase.READY)
    there = live.wait_for_tier(session, Tier.DEVICE)
    return Moved(there - said, live.place(session).bytes_in - before)


def check_whole(live: LiveEngine, moved: Moved, tokens: int) -> None:
    """Raise `NotAsMeant` unless the KV of so many tokens moved: the rest was there already."""
    whole = tokens * live.info.kv_bytes_per_token
    if moved.bytes < WHOLE * whole:
        raise NotAsMeant(f"only {moved.bytes} of {whole} bytes moved")


class Passer:
    """A session as large as the device. A device keeps the blocks of a session that has left until somebody needs the
    room, and one that comes back soon would find them there: after this one has passed over it, it does not.
    """

    def __init__(self, live: LiveEngine, random: Random, device_tokens: int, block_tokens: int = 16) -> None:
        self._live = live
        self._session = live.open()
        # Less the one block that a prefetch leaves to a session that had a turn just before.
        live.generate(self._session, random_tokens(random, device_tokens - block_tokens))
        park(live, self._session)

    def pass_over(self) -> None:
        """Come to the device and leave it."""
        fetch(self._live, self._session)
        park(self._live, self._session)
