"""Whose a folder is when two machines can reach it: the lease in its journal, and its renewals."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from app.backup import back_up
from app.domain.errors import Fenced, FieldOutOfRange, NotDurable
from app.domain.leases import NOBODYS, Lease
from app.domain.values import SessionId
from app.journal import lease, renewals
from app.journal.journal import FILE_NAME, Journal
from app.journal.lease_table import find_lease
from app.journal.lock import FolderLock
from tests.file_sizes import largest_file
from tests.journal.building import change, histories, model_info

ONE, TWO = SessionId("ses_1"), SessionId("ses_2")
LONG_S, SHORT_S = 3600.0, 1.0

On = Callable[[str], None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    """Go to another machine."""

    machines = ["one"]
    monkeypatch.setattr(lease, "machine_id", lambda: machines[-1])
    return machines.append


@pytest.fixture(params=[False, True], ids=["wal", "over a network"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the folder seems to be on a file system of several machines."""
    monkeypatch.setattr("app.journal.journal.is_over_network", lambda folder: request.param)
    return bool(request.param)


def freeze(journal: Journal) -> None:
    """It renews its lease no more, and gives it back to nobody."""
    assert journal.lease is not None
    journal.lease._closing.set()
    journal.lease._thread.join()


def let_go(journal: Journal) -> None:
    """Let go of its lock, as the kernel does for a process that has died."""
    journal._lock.close()


def renew(journal: Journal) -> bool:
    """Renew it now; whether it could be."""
    assert journal.lease is not None
    return journal.lease._renew()


def lapse(journal: Journal) -> None:
    """So much time passes that it runs out."""
    assert journal.lease is not None
    journal.lease._tenure.ends_at = 0.0


def has_lost(journal: Journal) -> bool:
    assert journal.lease is not None
    return journal.lease.is_lost


def is_fenced(journal: Journal) -> bool:
    return journal.state.is_fenced


def found(folder: Path) -> Lease:
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        return find_lease(connection)


def started(folder: Path, lease_s: float | None) -> Journal:
    journal = Journal(folder, lease_s)
    journal.load(model_info())
    journal.start()
    return journal


async def test_what_a_former_holder_writes_is_refused_whole(tmp_path: Path, on: On, shared: bool) -> None:
    """The lock of the first one is still there, as where locks reach other machines, and their holder is frozen."""
    first = started(tmp_path, SHORT_S)
    first.append(ONE, change(ONE, 0, [1, 2]))
    await first.settled(ONE)
    freeze(first)
    on("two")
    second = started(tmp_path, LONG_S)
    assert first.lease is not None
    assert second.lease is not None
    assert (first.lease.epoch, second.lease.epoch) == (1, 2)
    assert second.lease.holds
    assert not first.lease.holds
    assert not has_lost(first)
    first.append(ONE, change(ONE, 2, [3]))
    first.append(TWO, change(TWO, 0, [4]))
    with pytest.raises(NotDurable, match="another server has taken it"):
        await first.settled()
    assert has_lost(first)
    second.append(ONE, change(ONE, 2, [9]))
    await second.settled()
    first.close()
    assert found(tmp_path).epoch == 2
    assert not found(tmp_path).is_free
    second.close()
    assert found(tmp_path).is_free
    assert histories(tmp_path / FILE_NAME) == {ONE: [1, 2, 9]}


def test_a_frozen_holder_that_wakes_learns_that_it_has_lost_the_folder(
    tmp_path: Path, on: On, caplog: pytest.LogCaptureFixture
) -> None:
    first = Journal(tmp_path, SHORT_S)
    assert first.lease is not None
    freeze(first)
    on("two")
    second = Journal(tmp_path, LONG_S)
    assert "the start waits" in caplog.text
    assert "taken over after" in caplog.text
    assert not renew(first)
    assert has_lost(first)
    with pytest.raises(Fenced, match="another server has taken it"):
        first.lease.require()
    assert [line.levelname for line in caplog.records if "has taken the state folder" in line.message] == ["CRITICAL"]
    second.close()
    first.close()


def test_a_dead_holder_of_this_machine_is_not_waited_for(
    tmp_path: Path, on: On, caplog: pytest.LogCaptureFixture
) -> None:
    first = Journal(tmp_path, LONG_S)
    freeze(first)
    let_go(first)
    second = Journal(tmp_path, LONG_S)
    assert second.lease is not None
    assert second.lease.epoch == 2
    assert "waits" not in caplog.text
    second.close()
    first.close()


def test_a_holder_of_this_machine_that_lives_is_refused_at_once(tmp_path: Path, on: On) -> None:
    first = Journal(tmp_path, LONG_S)
    with pytest.raises(FieldOutOfRange, match="another server keeps its sessions in"):
        Journal(tmp_path, LONG_S)
    on("two")
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        connection.execute("UPDATE lease SET length_s = 0")
    with pytest.raises(FieldOutOfRange, match="another server keeps its sessions in"):  # it has no lease, but the lock
        Journal(tmp_path, LONG_S)
    first.close()


def test_a_server_without_a_lease_takes_the_folder_from_one_that_had_one(tmp_path: Path, on: On) -> None:
    first = Journal(tmp_path, SHORT_S)
    freeze(first)
    on("two")
    second = Journal(tmp_path)
    assert second.lease is None
    assert found(tmp_path).epoch == 2
    assert not renew(first)
    second.close()
    first.close()


def test_a_folder_that_never_had_a_lease_gets_none(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema")]
    assert "lease" not in tables


def test_a_lease_that_cannot_be_renewed_is_held_again_if_nobody_took_it(
    tmp_path: Path, on: On, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path, SHORT_S)
    assert journal.lease is not None
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        freeze(journal)
        lapse(journal)
        assert not renew(journal)
        with pytest.raises(Fenced, match="could not be renewed"):
            journal.lease.require()
        assert is_fenced(journal)
        other.execute("ROLLBACK")
    assert renew(journal)
    journal.lease.require()
    assert not is_fenced(journal)
    said = [line.message for line in caplog.records if line.name == "app.journal.lease"]
    assert [line.partition(" folder ")[2][:18] for line in said] == ["has run out, and n", "is held again: ses"]
    journal.close()


def test_the_file_is_for_several_machines_where_they_share_it(tmp_path: Path, on: On, shared: bool) -> None:
    for lease_s in (LONG_S, None, LONG_S):
        journal = Journal(tmp_path, lease_s)
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
            (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        assert mode == ("delete" if shared and lease_s else "wal")
        journal.close()


def test_a_renewal_whose_answer_was_lost_is_no_loss_and_an_end_in_order_no_wait(
    tmp_path: Path, on: On, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = Journal(tmp_path, LONG_S)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        connection.execute("UPDATE lease SET renewals = renewals + 1")
    assert renew(first)
    assert found(tmp_path).renewals == 2
    first.close()
    on("two")
    second = Journal(tmp_path, LONG_S)
    assert second.lease is not None
    assert second.lease.epoch == 2
    assert "waits" not in caplog.text
    second.close()


def test_a_backup_is_nobodys(tmp_path: Path, on: On) -> None:
    journal = started(tmp_path / "state", LONG_S)
    back_up(tmp_path / "state", None, tmp_path / "copy")
    journal.close()
    on("two")
    copy = Journal(tmp_path / "copy", LONG_S)
    assert copy.lease is not None
    assert copy.lease.epoch == 1
    copy.close()


def test_a_lock_that_another_server_has_replaced_is_held_no_more(tmp_path: Path) -> None:
    waited, taker = locks = FolderLock(tmp_path), FolderLock(tmp_path)

    def held() -> list[bool]:
        return [each.is_held for each in locks]

    assert held() == [True, False]
    taker.replace()  # it was quicker to take the lease
    assert held() == [False, True]
    waited.try_again()
    assert held() == [False, True]
    taker.close()
    waited.try_again()
    assert held() == [True, False]
    waited.close()


NO_ROOM = renewals.SIZE
"""Bytes of the largest file: that of the news may be as large, and the journal has no room."""


def test_a_lease_is_renewed_where_the_journal_takes_nothing(tmp_path: Path, on: On, shared: bool) -> None:
    first = started(tmp_path, LONG_S)
    freeze(first)
    news, row = (tmp_path / renewals.NAME).read_bytes(), found(tmp_path)
    lapse(first)
    with largest_file(NO_ROOM):
        assert renew(first)
    assert not is_fenced(first)
    assert found(tmp_path) == row
    assert (tmp_path / renewals.NAME).read_bytes() != news
    assert renew(first)
    assert found(tmp_path) == row.renewed()
    first.close()


def test_a_holder_without_room_learns_that_it_has_lost_the_folder(tmp_path: Path, on: On, shared: bool) -> None:
    first = Journal(tmp_path, SHORT_S)
    freeze(first)
    on("two")
    second = Journal(tmp_path, LONG_S)
    freeze(second)
    news = (tmp_path / renewals.NAME).read_bytes()
    with largest_file(NO_ROOM):
        assert not renew(first)
    assert has_lost(first)
    assert (tmp_path / renewals.NAME).read_bytes() == news
    second.close()
    first.close()


def lost_news(folder: Path) -> None:
    (folder / renewals.NAME).unlink()


def replaced_journal(folder: Path) -> None:
    shutil.copy(folder / FILE_NAME, folder / "copy")
    (folder / "copy").replace(folder / FILE_NAME)


def moved_folder(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


@pytest.mark.parametrize("loses", [lost_news, replaced_journal, moved_folder])
def test_a_holder_whose_files_are_not_those_that_others_look_at_renews_nothing(
    tmp_path: Path, on: On, shared: bool, loses: Callable[[Path], None]
) -> None:
    folder = tmp_path / "state"
    first = Journal(folder, LONG_S)
    freeze(first)
    news = (folder / renewals.NAME).read_bytes()
    loses(folder)
    lapse(first)
    with largest_file(NO_ROOM):
        assert not renew(first)
    assert is_fenced(first)
    if loses is replaced_journal:
        assert not renew(first)
        assert (folder / renewals.NAME).read_bytes() == news
    else:
        assert not (folder / renewals.NAME).exists()
    first.close()


@pytest.mark.parametrize("room", [0, renewals.SIZE - 1])
def test_a_lease_without_room_for_news_is_not_taken(tmp_path: Path, on: On, room: int) -> None:
    Journal(tmp_path).close()
    with (
        largest_file(room),
        pytest.raises(FieldOutOfRange, match=r"cannot use .*/renewals, .*: File too large; make room"),
    ):
        Journal(tmp_path, LONG_S)
    assert found(tmp_path) == NOBODYS
    journal = Journal(tmp_path, LONG_S)
    freeze(journal)
    with largest_file(NO_ROOM):
        assert renew(journal)
    journal.close()


@pytest.mark.parametrize("lease_s", [None, LONG_S])
def test_a_folder_whose_news_cannot_be_read_is_not_taken(tmp_path: Path, on: On, lease_s: float | None) -> None:
    first = Journal(tmp_path, LONG_S)
    freeze(first)
    (tmp_path / renewals.NAME).unlink()
    (tmp_path / renewals.NAME).mkdir()
    on("two")
    before = found(tmp_path)
    with pytest.raises(FieldOutOfRange, match=r"cannot use .*/renewals, .*: Is a directory; "):
        Journal(tmp_path, lease_s)
    assert found(tmp_path) == before
    first.close()
