"""Neighbours that do what the server is for."""

from collections.abc import Awaitable, Callable

from benchmarks.fairness.attacks.base import Target, again_and_again

PROMPT, ANSWER, TURNS = 128, 32, 4


def honest(count: int) -> Callable[[Target], Awaitable[None]]:
    """`count` agents at once: sessions of a few ordinary turns, one after the other."""

    async def run(target: Target) -> None:
        async def converse() -> None:
            session = await target.open()
            for _ in range(TURNS):
                await target.turn(session, PROMPT, ANSWER)
            await target.request("DELETE", session)

        await again_and_again(target, count, converse)

    return run
