"""How a session stands after a call whose answer never came."""

import asyncio
import time

from client import AsyncDjinn, AsyncSession
from client.errors import ConnectionLost, NotFound
from loadgen.load.prompts import TokenIds

GONE = None
SETTLED_S = 60.0
POLL_S = 0.05


async def settled(session: AsyncSession) -> TokenIds | None:
    """The session's history, once no turn runs in it and no breakpoint is armed; None if it is gone.

    A pause ends as cancelled. Raises `DjinnError`, `ConnectionLost` if its turn goes on for too long.
    """
    deadline = time.monotonic() + SETTLED_S
    try:
        while (info := await session.refresh()).state != "idle":
            if info.state == "paused":
                await session.cancel()
            if time.monotonic() > deadline:
                raise ConnectionLost(f"the turn of a client that is gone is {info.state} after {SETTLED_S:.0f} s")
            await asyncio.sleep(POLL_S)
        await session.clear_breakpoints()
        return (await session.history()).token_ids
    except NotFound:
        return GONE


async def close_strays(djinn: AsyncDjinn, agent: str, kept: AsyncSession | None) -> None:
    """Close the agent's sessions but one: forks and imports whose answer never came. Raises `DjinnError`."""
    strays = [session async for session in djinn.sessions.list() if session.info.metadata.get("agent") == agent]
    for stray in strays:
        if kept is None or stray.id != kept.id:
            await stray.close()
