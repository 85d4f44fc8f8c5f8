"""The measurements of which the costs of a server are made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import accumulate
from statistics import median
from typing import Literal

from client import AsyncSession, MemoryMap
from loadgen.errors import NotAsMeant
from loadgen.load.corpus import Corpus
from loadgen.load.prompts import TokenIds, fresh_prompts
from loadgen.load.turn_clock import TurnClock
from loadgen.load.workload import Workload
from loadgen.targets.djinn import DjinnAgent, DjinnTarget
from loadgen.targets.subject import Subject

REPEATS = 5
REST_S = 0.3
"""Of the server before a turn, as before most resumed turns. A turn with one new token had its first
after 19 ms then, and after 16 ms right behind another turn.
"""
STAGGER = 2
"""Tokens more for each session that decodes beside another: the last one begins while the first still goes on."""
DECODES, DECODED = 3, 16
"""Repeats with several sessions, and turns in all: how much of one can be drafted goes with its text."""
TRIES = 5
"""Of each repeat: on a busy machine one session may have ended before another begins."""
MOVED = 4
"""Sessions whose KV moves."""
SETTLES_S = 20.0
"""How long KV may take to be where it is sent."""
POLL_S = 0.01


def earlier_turns(load: Workload) -> list[int]:
    """New tokens of each turn before the one in the middle of an agent's, but of one at least."""
    return [load.context, *[load.resume_tokens] * (load.turns // 2 - 1)]


class Probe:
    """Measures one server, with sessions like those of a load."""

    def __init__(self, target: DjinnTarget, subject: Subject, corpus: Corpus, load: Workload, tokens: int) -> None:
        self._target, self._subject, self._corpus, self._tokens = target, subject, corpus, tokens
        self._context, self._resume_tokens, self._seed = load.context, load.resume_tokens, load.seed
        self._earlier = earlier_turns(load)
        self._completion = load.completion_tokens

    async def decode(self, count: int) -> tuple[list[float], tuple[float, ...]]:
        """Seconds of a step in which `count` sessions decode, each time, and the tokens of a step that each turn had,
        ascending.

        They are in the middle of their turns: the longer a history is, the more of what follows can be drafted.
        """
        earlier, seconds, decoded = self._earlier, list[float](), list[float]()
        repeats = max(DECODES, DECODED // count)
        for _ in range(TRIES * repeats):
            agents = [self._target.new_agent() for _ in range(count)]
            prompts = await self._prompts(count, sum(earlier) + self._resume_tokens)
            clocks, tokens = [TurnClock() for _ in agents], self._tokens + STAGGER * count
            try:
                for agent, prompt in zip(agents, prompts, strict=True):
                    for start, length in zip(accumulate(earlier, initial=0), earlier, strict=False):
                        await agent.run_turn(prompt[start : start + length], self._completion, TurnClock())
                turns = zip(agents, prompts, clocks, strict=True)
                await asyncio.gather(
                    *(agent.run_turn(prompt[sum(earlier) :], tokens, clock) for agent, prompt, clock in turns)
                )
            finally:
                await _close(agents)
            if (step_s := _step_s(clocks)) is None:
                continue
            seconds.append(step_s)
            decoded += [(tokens - 1) / max(1, len(clock.token_times_s) - 1) for clock in clocks]
            if len(seconds) == repeats:
                return seconds, tuple(sorted(decoded))
        raise NotAsMeant("the sessions did not decode at the same time: too few tokens for so many sessions")

    async def resumed(self, tokens: int) -> list[tuple[float, float]]:
        """Seconds to the first token of a turn with so many new tokens, in a session that is on the device, and from
        there to the second, which is the turn's last and so is not drafted; each time.
        """
        found = []
        for prompt in await self._prompts(REPEATS, self._context + tokens):
            agent = self._target.new_agent()
            try:
                await agent.run_turn(prompt[: self._context], 1, TurnClock())
                await asyncio.sleep(REST_S)
                found.append(await _two_tokens(agent, prompt[self._context :]))
            finally:
                await agent.close()
        return found

    async def opened_s(self, tokens: int) -> float:
        """Seconds to the first token of a session's first turn, with so many tokens."""
        found = []
        for prompt in await self._prompts(REPEATS, tokens):
            agent = self._target.new_agent()
            await asyncio.sleep(REST_S)
            try:
                found.append((await _two_tokens(agent, prompt))[0])
            finally:
                await agent.close()
        return median(found)

    async def moves(self) -> tuple[int, dict[str, float]]:
        """Bytes of KV of a token, and bytes per second by direction. There is no disk where the server has none."""
        before = await self._subject.memory()
        async with AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(self._subject.session()) for _ in range(MOVED)]
            for session, prompt in zip(sessions, await self._prompts(MOVED, self._context), strict=True):
                await session.generate(token_ids=prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
            held = (await self._subject.memory()).data.device.owned_bytes - before.data.device.owned_bytes
            bytes_per_token = max(1, round(held / (MOVED * self._context)))
            device_tokens = before.data.device.total_bytes // bytes_per_token
            await self._signal(sessions, "io_wait")
            await self._pass_over(device_tokens)
            await self._signal(sessions, "ready")
            await self._signal(sessions, "idle")
            await self._pass_over(device_tokens)
            await self._signal(sessions, "ready")
        after = await self._subject.memory()
        rates: dict[str, float] = {}
        for way, moved in after.moves.items():
            earlier = before.moves.get(way)
            size = moved.bytes - (earlier.bytes if earlier else 0)
            seconds = moved.seconds - (earlier.seconds if earlier else 0.0)
            if size and seconds:
                rates[way] = size / seconds
        if "out" not in rates or "in" not in rates:
            raise NotAsMeant("no KV moved: the server needs a host tier and the policy `signal`")
        return bytes_per_token, rates

    async def _pass_over(self, device_tokens: int) -> None:
        """Compute as much as the device holds: what is left there of KV that has moved would not be copied back."""
        for prompt in await self._prompts(-(-device_tokens // self._context), self._context):
            async with self._subject.session() as session:
                await session.generate(token_ids=prompt, max_tokens=1, temperature=0.0, ignore_eos=True)

    async def _signal(self, sessions: Sequence[AsyncSession], phase: Literal["io_wait", "idle", "ready"]) -> None:
        """Tell it of all sessions, and wait until their KV is where that sends it."""
        for session in sessions:
            await session.set_phase(phase)
        last, still_s, deadline = "", 0.0, time.monotonic() + SETTLES_S
        while still_s < 20 * POLL_S and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            now = _places(await self._subject.memory())
            still_s = still_s + POLL_S if now == last else 0.0
            last = now

    async def _prompts(self, count: int, tokens: int) -> tuple[TokenIds, ...]:
        return await fresh_prompts(count, tokens, self._corpus, self._seed, self._target.tokenize)


def _places(memory: MemoryMap) -> str:
    return f"{memory.sessions_by_tier} {memory.moves}"


async def _two_tokens(agent: DjinnAgent, prompt: TokenIds) -> tuple[float, float]:
    """Seconds to the first token, and from there to the second."""
    clock = TurnClock()
    await agent.run_turn(prompt, 2, clock)
    first, last = clock.token_times_s[0], clock.token_times_s[-1]
    return first, last - first


async def _close(agents: Sequence[DjinnAgent]) -> None:
    for agent in agents:
        await agent.close()


def _step_s(clocks: Sequence[TurnClock]) -> float | None:
    """Seconds of a step between the last first token and the first last one; None if the turns were not beside each
    other for a step. Each event has the tokens of a step.
    """
    started = [[clock.started + at for at in clock.token_times_s] for clock in clocks]
    begin, end = max(times[0] for times in started), min(times[-1] for times in started)
    inside = [[at for at in times if begin <= at <= end] for times in started]
    steps = [(times[-1] - times[0]) / (len(times) - 1) for times in inside if len(times) > 1]
    return median(steps) if steps else None
