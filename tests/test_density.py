"""Eighty sessions where the device holds twenty: nobody notices but by the clock."""

import asyncio
import random
from typing import Any

from app.domain.values import Phase, SamplingParams, StopRule, Tier
from app.engine_process.turn import TokenRun
from app.messages import TurnFinished
from app.routers.dependencies import Services
from tests.serving import running_services
from tests.taking_turns import start_turn

AGENTS = 80
TURNS = 3
CONTEXT = 400
GREEDY = SamplingParams(seed=0, temperature=0)
Answers = dict[int, list[list[int]]]


async def live(services: Services, number: int, answers: Answers) -> int:
    """One agent: three turns, and between them a random phase for a random time. Returns tokens computed twice."""
    registry, chance = services.sessions, random.Random(number)
    session, recomputed = registry.create(), 0
    answers[number] = []
    for turn_number in range(TURNS):
        new = [chance.randrange(256) for _ in range(CONTEXT if turn_number == 0 else 20)]
        turn = start_turn(registry, session, new, GREEDY, StopRule(max_tokens=16))
        tokens: list[int] = []
        async for item in turn:
            if isinstance(item, TokenRun):
                tokens += item.token_ids
            elif isinstance(item, TurnFinished):
                recomputed += item.usage.tokens_recomputed
        answers[number].append(tokens)
        registry.set_phase(session, chance.choice(list(Phase)), resume_in_ms=None)
        await asyncio.sleep(chance.uniform(0, 0.5))
        if chance.random() < 0.5:
            registry.set_phase(session, Phase.READY)
    registry.set_phase(session, Phase.IO_WAIT)
    return recomputed


async def run(**settings: Any) -> tuple[Answers, int]:
    answers: Answers = {}
    async with running_services(max_model_len=512, **settings) as services:
        lives = await asyncio.gather(*(live(services, number, answers) for number in range(AGENTS)))
        if "kv_host" in settings:
            await everything_is_off_the_device(services)
    return answers, sum(lives)


async def everything_is_off_the_device(services: Services) -> None:
    """Wait for it. What was read from disk for a turn that has just ended may still be on its way."""
    async with asyncio.timeout(60):
        while True:
            memory = await services.sessions.memory()
            assert memory.sessions == AGENTS
            if not memory.device.owned_bytes and set(memory.sessions_by_tier) <= {Tier.HOST, Tier.DISK, Tier.TO_DISK}:
                break
            await asyncio.sleep(0.01)
    assert sum(memory.sessions_by_tier.values()) == AGENTS


async def test_eighty_say_what_they_would_say_with_room_for_all() -> None:
    unlimited = await run(kv_device="100x512", kv_policy="none")
    assert await run(kv_device="20x512", kv_policy="signal", kv_host="100x512") == unlimited
    assert unlimited[1] == 0, "and nothing is computed twice"
