"""How much of the event loop a piece of work leaves to others."""

import asyncio
from collections.abc import Awaitable


async def turns_of_others(work: Awaitable[object]) -> int:
    """How often another task has run while `work` did."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await work
    running.cancel()
    return turns
