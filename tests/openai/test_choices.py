"""The turns of a call with many prompts: how they begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

from app.domain.values import SamplingParams, StopRule
from app.openai.choices import STARTED_AT_ONCE, Choices
from app.sessions.turns import TurnRequest
from app.text.turn_reader import TextRule
from tests.others import turns_of_others


class Silent:
    """A turn without news."""

    async def __aiter__(self) -> AsyncIterator[object]:
        await asyncio.Event().wait()
        yield None


async def test_others_run_while_a_call_with_many_prompts_begins() -> None:
    begun: list[object] = []

    def start(*given: object) -> Silent:
        begun.append(given)
        return Silent()

    registry: Any = SimpleNamespace(turns=SimpleNamespace(start=start))
    session: Any = nullcontext()
    request = TurnRequest([1], SamplingParams(seed=1), StopRule(1), TextRule())
    count = 8 * STARTED_AT_ONCE
    charges: Any = [None] * count
    async with AsyncExitStack() as cleanup:
        choices = Choices(registry, [request] * count, 1, charges, lambda: session, cleanup)
        assert await turns_of_others(choices.start()) >= 7
    assert len(begun) == count
