"""What the journal writes, what it loses on a full disk, and which folders it refuses."""

import asyncio
from pathlib import Path

import pytest

from app.domain.activations import UploadKey, UploadKind
from app.domain.breakpoints import TensorData
from app.domain.errors import FieldOutOfRange, NotDurable
from app.domain.values import JournalState, SessionId
from app.journal.journal import FILE_NAME, Journal
from tests.journal import written
from tests.journal.building import be_impatient, change, held_up, histories, limit_pages

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
