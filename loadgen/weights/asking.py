"""One batch of prompts, answered by a Djinn server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from client import AsyncSession
from loadgen.errors import NotAsMeant
from loadgen.prompts import TokenIds
from loadgen.subject import Subject, greedy
from loadgen.weights.generation import Generation


async def ask_djinn(subject: Subject, prompts: Sequence[TokenIds], tokens: int) -> Generation:
    """Send all prompts at once, each to a session of its own; that these are opened is not on the clock.

    Raises `DjinnError`, and `NotAsMeant` if a turn has another number of tokens or a prompt that was cached.
    """
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(subject.session()) for _ in prompts]
        began = time.perf_counter()
        turns = await asyncio.gather(
            *(_arrivals(session, prompt, tokens) for session, prompt in zip(sessions, prompts, strict=True))
        )
    return Generation([token_ids for _, token_ids in turns], [[at - began for at in arrivals] for arrivals, _ in turns])


async def _arrivals(session: AsyncSession, prompt: TokenIds, tokens: int) -> tuple[list[float], TokenIds]:
    """When each token came, and all of them."""
    times: list[float] = []
    async with session.stream(**greedy(prompt, tokens)) as stream:
        async for event in stream:
            times += [time.perf_counter()] * len(event.token_ids)
    turn = stream.turn
    if len(times) != tokens or turn.usage.cached_tokens:
        raise NotAsMeant(f"{len(times)} of {tokens} tokens came, {turn.usage.cached_tokens} of the prompt were cached")
    return times, turn.token_ids
