"""What noting a session costs: as much as has changed, however long its history is."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from app.domain.values import Phase, SessionId
from app.journal.journal import Journal
from app.sessions.keeper import SessionKeeper
from app.sessions.session import Session
from tests.journal.building import FILE, histories, model_info

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
