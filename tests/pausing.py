"""What tests of pauses share: turns that pause, without HTTP in front, and the same turns without pauses."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from app.domain.breakpoints import NEXT_BREAKPOINT, Action, Breakpoint, Pass, When
from app.domain.values import SessionState, StopRule
from app.messages import Paused, TurnFinished
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.sessions.turns import TurnRequest
from app.text.generation import TextRule, TurnReader
from tests.taking_turns import GREEDY

PROMPT = list(range(5, 45))
TOKENS = 6
EACH_TOKEN = Breakpoint("bp_00000000000000ea", (1,), Action.PAUSE, When(in_pass=Pass.DECODE))
PROMPT_END = Breakpoint("bp_0000000000000009", (0,), Action.PAUSE, When(in_pass=Pass.PREFILL))


def start(registry: SessionRegistry, session: Session, *stop: str, tokens: int = TOKENS, **sampling: Any) -> TurnReader:
    """A greedy turn; nobody has released it."""
    params = replace(GREEDY, **sampling)
    rule = TextRule(stop, logprobs=params.logprobs)
    request = TurnRequest(PROMPT, params, StopRule(max_tokens=tokens), rule)
    return registry.turns.start(session, request, AsyncExitStack())


async def read(reader: TurnReader) -> Paused | TurnFinished:
    return await asyncio.wait_for(reader.read(), 60)


async def finish(registry: SessionRegistry, session: Session, reader: TurnReader) -> TurnFinished:
    """Read to the turn's end, through every pause."""
    while isinstance(end := await read(reader), Paused):
        registry.pauses.resume(session, NEXT_BREAKPOINT)
    return end


async def whole(registry: SessionRegistry, *stop: str, **asked: Any) -> TurnReader:
    """The turn as it is without breakpoints."""
    session = registry.create()
    reader = start(registry, session, *stop, **asked)
    assert isinstance(await read(reader), TurnFinished)
    await registry.close(session)
    return reader


async def paused(
    registry: SessionRegistry, *stop: str, breakpoint: Breakpoint = EACH_TOKEN, **asked: Any
) -> tuple[Session, TurnReader]:
    """A session whose turn has come to its first pause."""
    session = registry.create(metadata={"a": "b"})
    await registry.whitebox.arm(session, breakpoint)
    reader = start(registry, session, *stop, **asked)
    assert isinstance(await read(reader), Paused)
    assert session.state is SessionState.PAUSED
    return session, reader


def assert_same(reader: TurnReader, expected: TurnReader) -> None:
    """The log-probabilities may differ by how many rows were computed together."""
    assert (reader.text, reader.token_ids) == (expected.text, expected.token_ids)
    assert reader.logprobs is not None
    assert expected.logprobs is not None
    for found, wanted in zip(reader.logprobs, expected.logprobs, strict=True):
        assert (found.token_id, len(found.top)) == (wanted.token_id, len(wanted.top))
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
