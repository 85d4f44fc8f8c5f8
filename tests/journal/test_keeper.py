"""Sessions as the journal keeps them: they come back as they were. What a full disk costs, and what is refused."""

import asyncio
import sqlite3
import struct
from array import array
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.activations import UploadKey, UploadKind
from app.domain.breakpoints import (
    Action,
    Breakpoint,
    Edit,
    EditOp,
    Gate,
    Intervention,
    OnTimeout,
    Pass,
    Positions,
    TensorData,
    When,
)
from app.domain.errors import FieldOutOfRange, NotDurable
from app.domain.positions import Run, runs_of
from app.domain.values import JournalState, SessionId, SessionState
from app.journal.journal import FILE_NAME, Journal
from app.journal.records import from_json, to_json
from app.sessions.keeper import SessionKeeper
from app.sessions.session import Session
from tests.journal import written
from tests.journal.building import FILE, be_impatient, change, execute, held_up, histories, limit_pages, model_info

FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
TENSORS = st.lists(FLOATS, min_size=1, max_size=4).map(lambda row: vector(*row))
EDITS = st.builds(
    Edit,
    op=st.sampled_from(EditOp),
    factor=st.floats(allow_nan=False, allow_infinity=False),
    vector=st.none() | TENSORS,
    positions=st.builds(Positions, st.integers(0, 99), st.none() | st.integers(0, 99), st.booleans()),
    max_norm=st.none() | st.floats(0, 1e9),
    gate=st.none() | st.builds(Gate, TENSORS, FLOATS),
)
BREAKPOINTS = st.builds(
    Breakpoint,
    id=st.text("0123456789abcdef", min_size=1, max_size=4),
    layers=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    action=st.sampled_from(Action),
    when=st.builds(When, st.sampled_from(Pass), st.none() | st.integers(0), st.none(), st.none() | st.integers(1)),
    edits=st.lists(EDITS, max_size=3).map(tuple),
    once=st.booleans(),
    timeout_s=st.floats(0.1, 86400),
    on_timeout=st.sampled_from(OnTimeout),
)
RUNS = st.sets(st.integers(0, 99), min_size=1).map(sorted).map(runs_of)
INTERVENTIONS = st.builds(Intervention, st.integers(0, 9), st.integers(10, 99), st.integers(1, 40), EDITS) | st.builds(
    Intervention.at, RUNS, st.integers(1, 40), EDITS
)


def vector_key(owner: str | None, name: str) -> UploadKey:
    return UploadKey(owner, UploadKind.VECTOR, name)


def vector(*values: float) -> TensorData:
    return TensorData("float32", (len(values),), struct.pack(f"<{len(values)}f", *values))


STEER = Breakpoint("bp_steer", (1,), Action.EDIT, edits=(Edit(EditOp.ADD, 0.5, vector(1, -2)),))
WATCH = Breakpoint("bp_watch", (0, 1), Action.PAUSE, When(position=4), once=True, timeout_s=3.5)
STEERED = Intervention.at((Run(0, 3, 2),), 2, STEER.edits[0])


def session(number: int = 1) -> Session:
    return Session(SessionId(f"ses_{number}"), None, history=array("I", [1, 2, 3]))


def restarted(journal: Journal, folder: Path) -> list[Session]:
    """What a new keeper finds."""
    journal.close()
    again = Journal(folder)
    found = SessionKeeper(again).load(model_info())
    again.close()
    return found


@given(breakpoints=st.lists(BREAKPOINTS, max_size=3), interventions=st.lists(INTERVENTIONS, max_size=3))
def test_every_breakpoint_and_intervention_comes_back_as_it_was(
    breakpoints: list[Breakpoint], interventions: list[Intervention]
) -> None:
    armed = tuple(breakpoints)
    assert from_json(Breakpoint, to_json(Breakpoint, armed, swapped), swapped) == armed
    for made in interventions:
        (back,) = from_json(Intervention, to_json(Intervention, [made], swapped), swapped)
        assert back == made
        assert back.clip(0, 100) == made.clip(0, 100)


def swapped(data: bytes) -> bytes:
    """Stands for a digest; the way back is the same."""
    return data[::-1]


@pytest.mark.parametrize("settle", [False, True])
async def test_the_last_word_counts_in_a_batch_and_over_several(journal: Journal, tmp_path: Path, settle: bool) -> None:
    keeper, kept, cleared = SessionKeeper(journal), session(1), session(2)
    for breakpoints in ({STEER.id: STEER}, {STEER.id: STEER, WATCH.id: WATCH}, {WATCH.id: WATCH}):
        kept.breakpoints = cleared.breakpoints = dict(breakpoints)
        keeper.note(kept)
        keeper.note(cleared)
        kept.history.append(9)
        keeper.note(kept)
        if settle:
            await journal.settled()
    cleared.breakpoints = {}
    keeper.note(cleared)
    back, none = restarted(journal, tmp_path)
    assert back.breakpoints == {WATCH.id: WATCH}
    assert list(back.history) == [1, 2, 3, 9, 9, 9]
    assert none.breakpoints == {}


async def test_interventions_are_appended_and_share_their_vectors(journal: Journal, tmp_path: Path) -> None:
    """A turn that is steered writes what it has made, not all that the session has ever had, nor a vector again."""
    keeper, kept = SessionKeeper(journal), session()
    wide = vector(*[0.5] * 10_000)

    async def written() -> int:
        before = (tmp_path / f"{FILE_NAME}-wal").stat().st_size
        keeper.note(kept)
        await journal.settled()
        return (tmp_path / f"{FILE_NAME}-wal").stat().st_size - before

    edit = Edit(EditOp.ADD, 0.5, wide)
    kept.interventions = tuple(Intervention(2 * n, 2 * n + 1, 2, edit) for n in range(1000))
    kept.history.extend([7] * 2000)
    await written()
    kept.interventions += (Intervention(2000, 2001, 2, Edit(EditOp.ADD, 0.25, wide)),)
    kept.interventions = (*kept.interventions[:-1], replace(kept.interventions[-1], end=2002))
    assert await written() < 40_000
    keeper.note(kept)
    [back] = restarted(journal, tmp_path)
    assert back.interventions == kept.interventions


def stored_tensors(folder: Path) -> int:
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM tensor").fetchone()
    return int(count)


async def test_a_vector_is_stored_once_for_as_long_as_anybody_refers_to_it(journal: Journal, tmp_path: Path) -> None:
    keeper, one, two, key = SessionKeeper(journal), session(1), session(2), vector_key("me", "calm")
    assert STEERED.edit.vector is not None
    for each in (one, two):
        each.breakpoints, each.interventions = {STEER.id: STEER}, (STEERED, replace(STEERED, boundary=1))
        keeper.note(each)
    journal.append(key, vector(1, -2))
    await journal.settled()
    assert stored_tensors(tmp_path) == 1
    keeper.forget(one)
    two.breakpoints = {}
    keeper.note(two)
    journal.append(key, vector(3, 4))
    await journal.settled()
    assert stored_tensors(tmp_path) == 2
    two.truncate(0)
    keeper.note(two)
    await journal.settled()
    assert stored_tensors(tmp_path) == 1
    journal.append(key, None)
    await journal.settled()
    assert stored_tensors(tmp_path) == 0


async def test_another_models_vectors_are_refused_even_without_a_session(journal: Journal, tmp_path: Path) -> None:
    journal.append(vector_key(None, "calm"), vector(1.0))
    journal.close()
    again = Journal(tmp_path)
    with pytest.raises(FieldOutOfRange, match=r"0 sessions and 1 upload .* model 'tiny'"):
        again.store.load(model_info("other"))
    again.close()


@pytest.mark.parametrize(
    "damage",
    [
        *(f"UPDATE breakpoints SET body = '{text}'" for text in ("", "[[]", '[{"id": "bp_1"}]', '["exec(1)"]')),
        *(f"UPDATE intervention SET body = '{text}'" for text in ("", "[]", '[{"first": 1}]')),
        "DELETE FROM intervention WHERE number = 0",
        "DELETE FROM tensor",
    ],
)
async def test_steering_that_cannot_be_read_is_named(journal: Journal, tmp_path: Path, damage: str) -> None:
    kept = session()
    gated = replace(STEERED, edit=replace(STEERED.edit, gate=Gate(vector(3, 4), 0.5)))
    kept.breakpoints, kept.interventions = {STEER.id: STEER}, (STEERED, gated)
    SessionKeeper(journal).note(kept)
    [found] = restarted(journal, tmp_path)
    assert found.interventions == kept.interventions
    execute(tmp_path / FILE_NAME, damage)
    again = Journal(tmp_path)
    with pytest.raises(FieldOutOfRange, match=FILE_NAME):
        SessionKeeper(again).load(model_info())
    again.close()


async def test_what_happens_to_a_closed_session_does_not_bring_it_back(journal: Journal, tmp_path: Path) -> None:
    keeper, closed = SessionKeeper(journal), session()
    keeper.note(closed)
    closed.move(SessionState.CLOSED)
    keeper.forget(closed)
    keeper.note(closed)
    assert restarted(journal, tmp_path) == []


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


ONE, TWO = SessionId("ses_1"), SessionId("ses_2")


async def test_append_does_not_wait_for_a_file_that_is_held_up(journal: Journal, tmp_path: Path) -> None:
    waiting = []
    with held_up(tmp_path):
        for index in range(200):
            session = SessionId(f"ses_{index:03}")
            journal.append(session, change(session, 0, [index]))
            waiting.append(asyncio.create_task(journal.settled()))
        waiting[0].cancel()
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting[1:])
        assert written.histories(tmp_path) == {}
    await asyncio.wait_for(asyncio.gather(*waiting[1:]), 60)
    assert len(written.histories(tmp_path)) == 200


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert not [each for each in caplog.records if each.exc_info]
    return [each.getMessage() for each in caplog.records if each.name == "app.journal.journal"]


async def test_a_full_disk_is_an_error_for_who_waits_and_loses_nothing_once_there_is_room(
    journal: Journal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal.append(ONE, change(ONE, 0, [1, 2, 3]))
    await journal.settled()
    limit_pages(journal)
    journal.append(ONE, change(ONE, 1, [9] * 10_000))
    for _ in range(2):
        with pytest.raises(NotDurable, match="full"):
            await journal.settled(ONE)
    journal.append(ONE, change(ONE, 10_000, [8]))
    journal.append(TWO, change(TWO, 0, [9] * 10_000))
    with pytest.raises(NotDurable):
        await journal.settled()
    assert written.histories(tmp_path)[ONE] == [1, 2, 3]
    assert journal.state.waiting == 2
    assert "full" in (journal.state.failure or "")
    assert journal.state.is_full
    limit_pages(journal, more=10_000)
    await journal.settled()
    assert journal.state == JournalState()
    [begun, ended] = said(caplog)
    assert "cannot be written" in begun
    assert "written again" in ended
    journal.close()
    assert histories(tmp_path / FILE_NAME) == {ONE: [1] + [9] * 9_999 + [8], TWO: [9] * 10_000}


async def test_on_a_full_disk_what_fits_is_written_and_only_the_others_are_told(
    journal: Journal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A change that is too large for the disk does not make the journal one that cannot be written."""
    journal.append(ONE, change(ONE, 0, [1]))
    await journal.settled()
    limit_pages(journal)
    journal.append(TWO, change(TWO, 0, [9] * 100_000))
    journal.append(ONE, change(ONE, 1, [2]))
    await journal.settled(ONE)
    with pytest.raises(NotDurable, match="full"):
        await journal.settled(TWO)
    assert written.histories(tmp_path) == {ONE: [1, 2]}
    assert journal.state == JournalState(waiting=1)
    assert len(said(caplog)) == 1
    limit_pages(journal, more=10_000)
    await journal.settled()
    assert len(written.histories(tmp_path)[TWO]) == 100_000


async def test_a_file_that_another_process_holds_is_no_full_disk(journal: Journal, tmp_path: Path) -> None:
    """No KV file has to go for it."""
    be_impatient(journal)
    with held_up(tmp_path):
        journal.append(ONE, change(ONE, 0, [1]))
        with pytest.raises(NotDurable, match="locked"):
            await journal.settled(ONE)
        assert journal.state == JournalState("database is locked", is_full=False, waiting=1)
    await journal.settled(ONE)
    assert journal.state == JournalState()


async def test_the_log_names_no_vector_and_no_owner(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    key = UploadKey("acme", UploadKind.VECTOR, "swordfish\ud800")  # SQLite takes no lone surrogate
    journal.append(key, TensorData("float32", (1,), bytes(4)))
    with pytest.raises(NotDurable):
        await journal.settled(key)
    (line,) = said(caplog)
    assert line.startswith("the journal cannot take the changes of a vector: ")
    assert "acme" not in line
    assert "swordfish" not in line
    journal.append(key, None)


def test_a_folder_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FieldOutOfRange, match=r"file.*--state-dir"):
        Journal(tmp_path / "file" / "state")


def test_a_damaged_journal_lets_go_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database at all")
    for _ in range(2):
        with pytest.raises(FieldOutOfRange, match=FILE_NAME):
            Journal(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    Journal(tmp_path).close()
