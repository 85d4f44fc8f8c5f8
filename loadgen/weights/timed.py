"""One batch of prompts, answered greedily, and how long it took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from client import AsyncSession
from loadgen.errors import LoadgenError
from loadgen.prompts import TokenIds, fingerprint
from loadgen.subject import Subject, greedy


class NotAsMeant(LoadgenError):
    """What was measured is not what was meant. The text says why."""


@dataclass(frozen=True, slots=True)
class Timed:
    """See `Sample`. `steps_per_s`: how often every session got a token."""

    first_s: float
    tokens_per_s: float
    steps_per_s: float
    answer: str


async def ask_djinn(subject: Subject, prompts: Sequence[TokenIds], tokens: int) -> Timed:
    """Send all prompts at once, each to a session of its own; that these are opened is not on the clock.

    Raises `DjinnError`, and `NotAsMeant` if a turn has another number of tokens.
    """
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(subject.session()) for _ in prompts]
        began = time.perf_counter()
        turns = await asyncio.gather(
            *(_arrivals(session, prompt, tokens) for session, prompt in zip(sessions, prompts, strict=True))
        )
    times = [[at - began for at in arrivals] for arrivals, _ in turns]
    return timed(times, [answer for _, answer in turns])


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


def timed(times: Sequence[Sequence[float]], answers: Sequence[Sequence[int]]) -> Timed:
    """Of the times of every session's tokens, in seconds from the start.

    Rates are from the moment when every session has its first token to that when one has its last. Raises `NotAsMeant`
    if there is nothing in between.
    """
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    counted = sum(1 for each in times for at in each if begin < at <= end)
    if not counted:
        raise NotAsMeant("one session had all of its tokens before another had its first: let there be more tokens")
    rate = counted / (end - begin)
    return Timed(begin, rate, rate / len(times), fingerprint([[tuple(answer)] for answer in answers]))
