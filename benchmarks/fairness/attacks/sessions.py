"""Attacks by sessions: how many there are, and what they signal."""

import asyncio
import itertools

from benchmarks.fairness.attacks.base import Attack, Target, again_and_again

FLIPPING = 300
FORKS = 24
AWAY_MS = 50


async def flipping_phases(target: Target) -> None:
    sessions = [await target.open() for _ in range(FLIPPING)]
    for some in (sessions[first : first + 16] for first in range(0, FLIPPING, 16)):
        await asyncio.gather(*(target.turn(session, 32, 1) for session in some))
    order = itertools.cycle(sessions)

    async def flip() -> None:
        session = next(order)
        await target.post(f"{session}/phase", {"phase": "io_wait", "resume_in_ms": AWAY_MS})
        await target.post(f"{session}/phase", {"phase": "ready"})

    await again_and_again(target, 8, flip)


async def forks_of_forks(target: Target) -> None:
    async def fork() -> None:
        session = await target.open()
        await target.turn(session, 200, 1)
        family = [session]
        for _ in range(FORKS):
            child = await target.post(f"{target.chance.choice(family)}/fork")
            if "id" in child:
                family.append(f"/v1/sessions/{child['id']}")
                await target.turn(family[-1], 4, 4)
        for each in family:
            await target.request("DELETE", each)

    await again_and_again(target, 4, fork)


async def sessions_without_end(target: Target) -> None:
    await again_and_again(target, 16, target.open)


ATTACKS = (
    Attack("phase-flips", "300 sessions go and come back every 50 ms", flipping_phases),
    Attack("forks", "4 at once fork forks, and take a turn in each", forks_of_forks),
    Attack("session-flood", "16 at once open sessions and never close one", sessions_without_end),
)
