"""One batch of prompts, the answers, and their times."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from client import AsyncSession
from loadgen.errors import NotAsMeant
from loadgen.load.prompts import TokenIds, fingerprint
from loadgen.targets.subject import Subject, greedy


@dataclass(frozen=True, slots=True)
class Timed:
    """See `Sample`. `steps_per_s`: how often every session got a token."""

    first_s: float
    tokens_per_s: float
    steps_per_s: float


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens of every session, and when each of them came, in seconds from the start."""

    token_ids: Sequence[Sequence[int]]
    times: Sequence[Sequence[float]]

    @property
    def fingerprint(self) -> str:
        """Of the tokens."""
        return fingerprint([[tuple(tokens)] for tokens in self.token_ids])

    def timed(self) -> Timed:
        """Rates are from the moment when every session has its first token to that when one has its last. Raises
        `NotAsMeant` if there is nothing in between.
        """
        begin, end = max(each[0] for each in self.times), min(each[-1] for each in self.times)
        counted = sum(1 for each in self.times for at in each if begin < at <= end)
        if not counted:
            raise NotAsMeant("one session had all of its tokens before another had its first: let there be more tokens")
        rate = counted / (end - begin)
        return Timed(begin, rate, rate / len(self.times))


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
