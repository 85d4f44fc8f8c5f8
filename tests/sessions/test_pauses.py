"""Pauses end in every way that there is, whoever is at it at the same moment, and leave nothing behind."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from app.domain.breakpoints import NEXT_BREAKPOINT, Edit, EditOp, Positions, Until, When
from app.domain.errors import Draining, FieldOutOfRange, NotFound, WrongState
from app.domain.values import FinishReason, Phase, SessionState
from app.messages import TurnFinished
from app.routers.dependencies import Services
from app.sessions.lifecycle import drain
from tests.pausing import (
    EACH_TOKEN,
    PROMPT,
    PROMPT_END,
    TOKENS,
    assert_idle,
    assert_same,
    finish,
    paused,
    read,
    start,
    whole,
)
from tests.taking_turns import assert_nothing_is_held, engine_tokens, until

BRIEF = 0.1


async def test_a_turn_goes_through_its_pauses_as_it_would_without_them(services: Services) -> None:
    registry = services.sessions
    expected = await whole(registry, logprobs=2)
    session, reader = await paused(registry, logprobs=2)
    assert session.pause is not None
    assert session.pause.info.breakpoint == EACH_TOKEN.id
    assert session.pause.expires_at == pytest.approx(time.time() + 600, abs=5)
    assert reader.token_ids == expected.token_ids[:1]
    end = await finish(registry, session, reader)
    assert end.reason is FinishReason.LENGTH
    assert_same(reader, expected)
    assert_idle(session)
    assert len(session.history) == await engine_tokens(registry, session) == len(PROMPT) + TOKENS
    assert session.usage.completion_tokens == TOKENS


async def test_a_stop_string_that_spans_pauses_ends_the_turn(services: Services) -> None:
    registry = services.sessions
    text = (await whole(registry, tokens=12)).text
    stop = text[5:8]
    expected = await whole(registry, stop, tokens=12)
    session, reader = await paused(registry, stop, tokens=12)
    end = await finish(registry, session, reader)
    assert (end.reason, reader.text, reader.token_ids) == (FinishReason.STOP, expected.text, expected.token_ids)
    assert len(session.history) == await engine_tokens(registry, session) == len(PROMPT) + len(expected.token_ids)


async def test_only_a_paused_session_can_be_resumed_and_only_once(services: Services) -> None:
    registry = services.sessions
    session, _ = await paused(registry)
    registry.pauses.resume(session, NEXT_BREAKPOINT)
    with pytest.raises(WrongState, match="queued"):
        registry.pauses.resume(session, NEXT_BREAKPOINT)
    with pytest.raises(WrongState, match="must be paused"):
        await registry.checkpoints.read(session, Positions())
    with pytest.raises(WrongState, match="must be paused"):
        await registry.checkpoints.edit(session, (Edit(EditOp.ABLATE),))
    with pytest.raises(WrongState, match="must be paused"):
        await registry.checkpoints.lens(session, Positions(), 1)
    with pytest.raises(WrongState, match="must be paused"):
        registry.pauses.resume(registry.create(), NEXT_BREAKPOINT)


async def test_a_paused_session_takes_no_turn_and_no_rewind(services: Services) -> None:
    registry = services.sessions
    session, _ = await paused(registry)
    with pytest.raises(WrongState, match="paused"):
        start(registry, session)
    with pytest.raises(WrongState, match="paused"):
        await registry.rewind(session, 0)
    registry.set_phase(session, Phase.IO_WAIT)
    reader = registry.pauses.resume(session, Until(end=True))
    assert session.phase.value == "compute"
    assert isinstance(await read(reader), TurnFinished)


@pytest.mark.parametrize("layer", [0, 1, 99])
async def test_a_layer_that_the_pass_does_not_come_to_is_named(services: Services, layer: int) -> None:
    session, _ = await paused(services.sessions)
    with pytest.raises(FieldOutOfRange) as wrong:
        services.sessions.pauses.resume(session, Until(layer=layer))
    assert wrong.value.param == "until.layer"
    assert session.state is SessionState.PAUSED


async def test_a_cancel_is_not_overtaken_by_a_resume_nor_the_other_way_round(services: Services) -> None:
    registry = services.sessions
    for resumed_first in (False, True):
        session, reader = await paused(registry, tokens=500)
        if resumed_first:
            registry.pauses.resume(session, NEXT_BREAKPOINT)
        registry.ends.cancel(session, reader.turn)
        with pytest.raises(WrongState):
            registry.pauses.resume(session, NEXT_BREAKPOINT)
        await asyncio.wait_for(reader.turn.ended.wait(), 60)
        assert session.state is SessionState.IDLE
        assert len(session.history) == await engine_tokens(registry, session)
        again = start(registry, session, tokens=1)
        assert isinstance(await finish(registry, session, again), TurnFinished)


async def test_who_leaves_before_the_pause_ends_the_turn_and_who_leaves_at_it_does_not(services: Services) -> None:
    registry = services.sessions
    session = registry.create()
    await registry.breakpoints.arm(session, PROMPT_END)
    reader = start(registry, session)
    registry.ends.release(session, reader.turn)
    end = await read(reader)
    assert isinstance(end, TurnFinished)
    assert end.reason is FinishReason.CANCELLED
    session, reader = await paused(registry, breakpoint=PROMPT_END)
    registry.ends.release(session, reader.turn)
    await registry.memory()
    assert session.state is SessionState.PAUSED


async def test_who_has_resumed_a_turn_ends_it_by_leaving_but_nobody_before(services: Services) -> None:
    registry = services.sessions
    session, reader = await paused(registry, breakpoint=PROMPT_END, tokens=900)
    registry.pauses.resume(session, NEXT_BREAKPOINT)
    registry.ends.release(session, reader.turn)  # of whoever had started it
    await until(lambda: session.state is SessionState.RUNNING)
    registry.ends.release(session, reader.turn)
    end = await read(reader)
    assert isinstance(end, TurnFinished)
    assert end.reason is FinishReason.CANCELLED


async def test_a_paused_session_that_is_closed_leaves_nothing(services: Services) -> None:
    registry = services.sessions
    session, reader = await paused(registry, breakpoint=replace(EACH_TOKEN, timeout_s=BRIEF))
    await registry.close(session)
    assert reader.turn.ended.is_set()
    with pytest.raises(NotFound):
        registry.table.get(session.id)
    await asyncio.sleep(2 * BRIEF)
    await assert_nothing_is_held(registry)


async def test_at_the_end_nobody_waits_for_a_paused_turn_nor_for_one_that_pauses_then(services: Services) -> None:
    registry = services.sessions
    (at_rest, first), (going, second) = await paused(registry), await paused(registry, tokens=500)
    registry.pauses.resume(going, Until(end=True))
    late = registry.create()
    await registry.breakpoints.arm(late, replace(EACH_TOKEN, when=When(position=len(PROMPT) + 3)))
    third = start(registry, late, tokens=500)
    draining = asyncio.create_task(drain(registry, timeout_s=30))
    await asyncio.wait_for(asyncio.gather(first.turn.ended.wait(), third.turn.ended.wait()), 60)
    with pytest.raises((Draining, WrongState)):
        registry.pauses.resume(at_rest, NEXT_BREAKPOINT)
    registry.ends.cancel(going, second.turn)
    await asyncio.wait_for(draining, 60)
    assert {each.state for each in (at_rest, going, late)} == {SessionState.IDLE}
    end = await read(third)
    assert isinstance(end, TurnFinished)
    assert end.reason is FinishReason.CANCELLED
