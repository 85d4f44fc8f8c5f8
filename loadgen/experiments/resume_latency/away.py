"""Sessions that leave the device, so that nothing of them is left there, and come back."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from client import AsyncSession, MemoryMap
from client.models import Tier
from loadgen.errors import LoadgenError, NotAsMeant
from loadgen.load.prompts import TokenIds
from loadgen.load.stopwatch import Stopwatch
from loadgen.targets.subject import Subject, greedy

POLL_S = 0.0005
TIMEOUT_S = 60.0
SPARE_TOKENS = 256
"""What a device should hold besides the longest session."""

MAX_PASSERS = 4
"""So many sessions of full length may be needed to fill the device; a larger one takes too long to fill each time."""


def passer_lengths(memory: MemoryMap, name: str, *, longest: int, max_model_len: int) -> list[int]:
    """How long sessions must be that fill the device together, less the one block that a prefetch leaves to others.

    Raises `LoadgenError` unless the server moves KV on signals, its device holds a session of `longest` tokens but not
    many times more, and its host that session and all of these.
    """
    data = memory.data
    device, host = (tier.total_bytes // data.block_bytes * data.block_tokens for tier in (data.device, data.host))
    wanted = device - data.block_tokens
    if memory.policy != "signal":
        raise LoadgenError(f"target {name} does not listen to signals: start it with --kv-policy signal")
    if wanted < longest or device > MAX_PASSERS * max_model_len:
        raise LoadgenError(
            f"target {name} holds {device} tokens on its device, but for sessions that leave it should hold little "
            f"more than the longest: start it with --kv-device 1x{longest + SPARE_TOKENS}"
        )
    if host < device + longest:
        raise LoadgenError(
            f"target {name} holds {host} tokens on its host, but at least {device + longest} are needed: start it "
            f"with --kv-host 2x{device}"
        )
    count = -(-device // (max_model_len - 1))
    return [(wanted + place) // count for place in range(count)]


class Passers:
    """Sessions as large as the device together. A device keeps the blocks of a session that has left until somebody
    needs the room, and one that comes back soon would find them there: after these have passed over it, it does not.
    """

    def __init__(self, sessions: Sequence[AsyncSession]) -> None:
        self._sessions = sessions

    async def send_away(self, session: AsyncSession) -> None:
        """Signal `io_wait` for the session, and return when the device has nothing of it. Raises `NotAsMeant`."""
        await park(session)
        for passer in self._sessions:
            await fetch(passer)
            await park(passer)


@asynccontextmanager
async def passers(subject: Subject, histories: Sequence[TokenIds]) -> AsyncIterator[Passers]:
    """Compute them; they are closed at the end of the block. Raises `DjinnError` and `NotAsMeant`."""
    async with AsyncExitStack() as stack:
        sessions = []
        for history in histories:
            session = await stack.enter_async_context(subject.session())
            await session.generate(**greedy(history, 1))
            await park(session)
            sessions.append(session)
        yield Passers(sessions)


async def park(session: AsyncSession) -> None:
    """Signal `io_wait`, and return when the KV has left the device. Raises `NotAsMeant`."""
    await session.set_phase("io_wait")
    await _wait_for(session, "host")


async def fetch(session: AsyncSession) -> float:
    """Signal `ready`, and return when the KV is on the device again; how long that took. Raises `NotAsMeant`."""
    watch = Stopwatch()
    await session.set_phase("ready")
    await _wait_for(session, "device")
    return watch.lap()


async def _wait_for(session: AsyncSession, tier: Tier) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while (await session.refresh()).kv.tier != tier:
        if time.monotonic() > deadline:
            raise NotAsMeant(f"after {TIMEOUT_S:g} s the KV is in tier {session.info.kv.tier}, not in {tier}")
        await asyncio.sleep(POLL_S)
