"""What an export promises while others use the session."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.domain.errors import WrongState
from app.domain.values import StopRule
from app.exports.exports import export_session
from tests.exports.spooling import spooled
from tests.serving import running_services
from tests.taking_turns import GREEDY, PROMPT, finish, start_turn


async def test_an_export_that_a_turn_overtakes_is_refused(tmp_path: Path) -> None:
    """The file would have a history that its label does not speak of."""
    async with running_services() as services:
        registry = services.sessions
        session = registry.create()
        await finish(start_turn(registry, session, PROMPT, GREEDY, StopRule(max_tokens=3)))
        exporting = asyncio.create_task(export_session(registry, session, spooled(tmp_path / "overtaken")))
        await asyncio.sleep(0)
        turn = start_turn(registry, session, [5], GREEDY, StopRule(max_tokens=3))
        with pytest.raises(WrongState, match=r"history .* has changed meanwhile"):
            await exporting
        await finish(turn)
        exported = await export_session(registry, session, spooled(tmp_path / "again"))
        assert exported.tokens == len(session.history)
