"""Sessions as the journal keeps them, and what noting one costs."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.bridge.turn import Turn
from app.domain.values import ForkPoint, Phase, Residency, SessionId, SessionState, Ticket, TurnUsage
from app.journal.journal import Journal
from app.sessions.keeper import SessionKeeper
from app.sessions.session import Session
from app.sessions.usage import SessionUsage
from tests.journal.building import FILE, histories, model_info


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[SessionKeeper]:
    """A keeper on a journal in `tmp_path`; what it notes is written when the fixture ends, or with `restarted`."""
    journal = Journal(tmp_path)
    keeper = SessionKeeper(journal)
    assert keeper.load(model_info()) == []
    journal.start()
    yield keeper
    journal.close()


async def restarted(keeper: SessionKeeper, folder: Path) -> list[Session]:
    """What a new keeper finds."""
    assert keeper._journal is not None
    keeper._journal.close()
    journal = Journal(folder)
    found = SessionKeeper(journal).load(model_info())
    journal.close()
    return found


def session(number: int, **fields: Any) -> Session:
    return Session(SessionId(f"ses_{number}"), None, history=array("I", [1, 2, 3]), **fields)


async def test_every_field_comes_back(keeper: SessionKeeper, tmp_path: Path) -> None:
    kept = Session(
        SessionId("ses_1"),
        "me",
        {"naïve": "\ud800 \N{GRINNING FACE}"},
        ttl_s=5,
        residency=Residency.GUARANTEED,
        name="conversation 7",
        phase=Phase.IO_WAIT,
        history=array("I", [5, 6]),
        forked_from=ForkPoint(SessionId("ses_0"), 2),
        usage=SessionUsage(1, 2, 3, 4, queue_ms=0.5, last=TurnUsage(1, 2, 3, 4)),
        created_at=1.25,
        used_at=2.25,
    )
    keeper.note(kept)
    [back] = await restarted(keeper, tmp_path)
    assert back.state is SessionState.IDLE
    for field in ("id", "owner", "metadata", "ttl_s", "residency", "name", "phase", "history", "forked_from", "usage"):
        assert getattr(back, field) == getattr(kept, field)
    assert (back.created_at, back.used_at) == (1.25, 2.25)


@pytest.mark.parametrize("state", [SessionState.QUEUED, SessionState.RUNNING, SessionState.PAUSED])
async def test_half_a_turn_is_not_kept(keeper: SessionKeeper, tmp_path: Path, state: SessionState) -> None:
    busy = session(1)
    keeper.note(busy)
    busy.begin(Turn(Ticket(1)), busy.history + array("I", [4]), 8)
    busy.state = state
    busy.history.append(5)
    keeper.note(busy)
    [back] = await restarted(keeper, tmp_path)
    assert list(back.history) == [1, 2, 3]


async def test_what_happens_to_a_closed_session_does_not_bring_it_back(keeper: SessionKeeper, tmp_path: Path) -> None:
    closed = session(1)
    keeper.note(closed)
    closed.move(SessionState.CLOSED)
    keeper.forget(closed)
    keeper.note(closed)
    assert await restarted(keeper, tmp_path) == []


async def test_however_a_history_changes_it_comes_back_as_it_is(keeper: SessionKeeper, tmp_path: Path) -> None:
    kept = session(1)
    for history in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2], [1, 2, 9, 9], [], [7], [7]):
        kept.history = array("I", history)
        keeper.note(kept)
        await keeper.settled(kept)
    kept.history.append(8)
    keeper.note(kept)
    [back] = await restarted(keeper, tmp_path)
    assert list(back.history) == [7, 8]


LONG = 1_000_000


def signal(session: Session) -> None:
    session.phase = Phase.IO_WAIT


def rewind(session: Session) -> None:
    del session.history[LONG - 5 :]


def lengthen(session: Session) -> None:
    session.history.extend([7, 8, 9])


@pytest.mark.parametrize("change", [signal, rewind, lengthen])
async def test_a_note_copies_only_what_has_changed(tmp_path: Path, change: Callable[[Session], None]) -> None:
    journal = Journal(tmp_path)
    keeper = SessionKeeper(journal)
    keeper.load(model_info())
    journal.start()
    session = Session(SessionId("ses_1"), None, history=array("I", bytes(4 * LONG)))
    keeper.note(session)
    await keeper.settled(session)
    change(session)
    tracemalloc.start()
    keeper.note(session)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    journal.close()
    assert peak < LONG / 10
    assert histories(tmp_path / FILE) == {"ses_1": session.history.tolist()}


async def test_a_restored_session_that_is_cut_and_then_continued_is_kept_as_it_is(tmp_path: Path) -> None:
    for number in range(3):
        journal = Journal(tmp_path)
        keeper = SessionKeeper(journal)
        found = keeper.load(model_info())
        journal.start()
        session = found[0] if found else Session(SessionId("ses_1"), None, history=array("I", [1, 2, 3, 4]))
        keeper.note(session)
        del session.history[2:]
        keeper.note(session)
        session.history = session.history + array("I", [10 + number, 20 + number])
        keeper.note(session)
        journal.close()
        assert histories(tmp_path / FILE) == {"ses_1": [1, 2, 10 + number, 20 + number]}
