"""What an export promises while others use the session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.domain.errors import WrongState
from app.domain.values import StopRule, Ticket
from app.exports.exports import export_session
from app.messages import Command
from tests.exports.spooling import spooled
from tests.serving import running_services
from tests.taking_turns import GREEDY, PROMPT, finish, start_turn


async def test_an_export_that_a_turn_overtakes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file would have a history that its label does not speak of."""
    async with running_services() as services:
        registry = services.sessions
        session = registry.create()
        await finish(start_turn(registry, session, PROMPT, GREEDY, StopRule(max_tokens=3)))
        call = registry.executor.call

        async def overtaken(make: Callable[[Ticket], Command]) -> Any:
            monkeypatch.setattr(registry.executor, "call", call)
            await finish(start_turn(registry, session, [5], GREEDY, StopRule(max_tokens=3)))
            return await call(make)

        monkeypatch.setattr(registry.executor, "call", overtaken)
        with pytest.raises(WrongState, match=r"history .* has changed meanwhile"):
            await export_session(registry, session, spooled(tmp_path / "overtaken"))
        exported = await export_session(registry, session, spooled(tmp_path / "again"))
        assert exported.tokens == len(session.history)
