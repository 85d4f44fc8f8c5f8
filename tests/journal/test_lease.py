"""Whose a folder is when two machines can reach it: the lease in its journal, and its renewals."""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from app.backup import back_up
from app.domain.errors import FieldOutOfRange, NotDurable
from app.domain.values import SessionId
from app.journal import journal as journals
from app.journal.journal import FILE_NAME, Journal
from app.journal.lease import NEWS_BYTES, NEWS_NAME, FolderLease, Lease, find_lease
from tests.file_sizes import largest_file
from tests.journal.building import change, execute, histories, started

ONE, TWO = SessionId("ses_1"), SessionId("ses_2")
LONG_S, SHORT_S = 3600.0, 1.0

On = Callable[[str], None]
Take = Callable[..., Journal]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:

    machines = ["one"]
    monkeypatch.setattr(journals, "machine_id", lambda: machines[-1])
    return machines.append


@pytest.fixture
def take() -> Iterator[Take]:
    """A journal in a folder, which is closed in the end."""
    with ExitStack() as ends:
        yield lambda folder, lease_s=None: ends.enter_context(closing(Journal(folder, lease_s)))


@pytest.fixture(params=[False, True], ids=["wal", "over a network"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the folder seems to be on a file system of several machines."""
    monkeypatch.setattr("app.journal.journal.is_over_network", lambda folder: request.param)
    return bool(request.param)


def held(journal: Journal) -> FolderLease:
    assert journal.lease is not None
    return journal.lease


def freeze(journal: Journal) -> None:
    """The server stops renewing its lease, and does not release it."""
    held(journal)._closing.set()
    held(journal)._thread.join()


def renew(journal: Journal) -> bool:
    """Renew it now; whether it could be."""
    return held(journal)._renew()


def lapse(journal: Journal) -> None:
    """So much time passes that it runs out."""
    held(journal).ends_at = 0.0


def found(folder: Path) -> Lease:
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        return find_lease(connection)


async def test_what_a_former_holder_writes_is_refused_whole(tmp_path: Path, on: On, shared: bool) -> None:
    """The lock of the first one is still there, as where locks reach other machines, and their holder is frozen."""
    first = started(tmp_path, SHORT_S)
    first.append(ONE, change(ONE, 0, [1, 2]))
    await first.settled(ONE)
    freeze(first)
    on("two")
    second = started(tmp_path, LONG_S)
    assert (held(first).lease.epoch, held(second).lease.epoch) == (1, 2)
    assert held(second).holds
    assert not held(first).holds
    assert not held(first).is_lost
    first.append(ONE, change(ONE, 2, [3]))
    first.append(TWO, change(TWO, 0, [4]))
    with pytest.raises(NotDurable, match="another server has taken it"):
        await first.settled()
    assert held(first).is_lost
    second.append(ONE, change(ONE, 2, [9]))
    await second.settled()
    first.close()
    assert found(tmp_path).epoch == 2
    assert not found(tmp_path).is_free
    second.close()
    assert found(tmp_path).is_free
    assert histories(tmp_path / FILE_NAME) == {ONE: [1, 2, 9]}


def test_a_dead_holder_of_this_machine_is_not_waited_for(
    tmp_path: Path, take: Take, on: On, caplog: pytest.LogCaptureFixture
) -> None:
    first = take(tmp_path, LONG_S)
    freeze(first)
    (tmp_path / "lock").unlink()  # of a process that has died
    second = take(tmp_path, LONG_S)
    assert held(second).lease.epoch == 2
    assert "waits" not in caplog.text


def test_a_holder_of_this_machine_that_lives_is_refused_at_once(tmp_path: Path, take: Take, on: On) -> None:
    take(tmp_path, LONG_S)
    with pytest.raises(FieldOutOfRange, match="another server keeps its sessions in"):
        Journal(tmp_path, LONG_S)
    on("two")
    execute(tmp_path / FILE_NAME, "UPDATE lease SET length_s = 0")
    with pytest.raises(FieldOutOfRange, match="another server keeps its sessions in"):  # it has no lease, but the lock
        Journal(tmp_path, LONG_S)


def test_a_server_without_a_lease_takes_the_folder_from_one_that_had_one(tmp_path: Path, take: Take, on: On) -> None:
    first = take(tmp_path, SHORT_S)
    freeze(first)
    on("two")
    second = take(tmp_path)
    assert second.lease is None
    assert found(tmp_path).epoch == 2
    assert not renew(first)


def test_the_file_is_for_several_machines_where_they_share_it(tmp_path: Path, on: On, shared: bool) -> None:
    for lease_s in (LONG_S, None, LONG_S):
        journal = Journal(tmp_path, lease_s)
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
            (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        assert mode == ("delete" if shared and lease_s else "wal")
        journal.close()


def test_a_renewal_whose_answer_was_lost_is_no_loss_and_an_end_in_order_no_wait(
    tmp_path: Path, take: Take, on: On, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = take(tmp_path, LONG_S)
    execute(tmp_path / FILE_NAME, "UPDATE lease SET renewals = renewals + 1")
    assert renew(first)
    assert found(tmp_path).renewals == 2
    first.close()
    on("two")
    second = take(tmp_path, LONG_S)
    assert held(second).lease.epoch == 2
    assert "waits" not in caplog.text


def test_a_backup_is_nobodys(tmp_path: Path, take: Take, on: On) -> None:
    journal = started(tmp_path / "state", LONG_S)
    back_up(tmp_path / "state", None, tmp_path / "copy")
    journal.close()
    on("two")
    copy = take(tmp_path / "copy", LONG_S)
    assert held(copy).lease.epoch == 1


NO_ROOM = NEWS_BYTES
"""Bytes of the largest file: that of the news may be as large, and the journal has no room."""


def test_a_holder_without_room_learns_that_it_has_lost_the_folder(
    tmp_path: Path, take: Take, on: On, shared: bool
) -> None:
    first = take(tmp_path, SHORT_S)
    freeze(first)
    on("two")
    second = take(tmp_path, LONG_S)
    freeze(second)
    news = (tmp_path / NEWS_NAME).read_bytes()
    with largest_file(NO_ROOM):
        assert not renew(first)
    assert held(first).is_lost
    assert (tmp_path / NEWS_NAME).read_bytes() == news


def lost_news(folder: Path) -> None:
    (folder / NEWS_NAME).unlink()


def test_a_folder_whose_news_cannot_be_read_is_not_taken(tmp_path: Path, take: Take, on: On) -> None:
    """A holder without room may live, and say so there."""
    freeze(take(tmp_path, SHORT_S))
    lost_news(tmp_path)
    (tmp_path / NEWS_NAME).mkdir()
    on("two")
    before = found(tmp_path)
    with pytest.raises(FieldOutOfRange, match=r"cannot use .*/renewals, .*: Is a directory; "):
        take(tmp_path)
    assert found(tmp_path) == before


def replaced_journal(folder: Path) -> None:
    shutil.copy(folder / FILE_NAME, folder / "copy")
    (folder / "copy").replace(folder / FILE_NAME)


def moved_folder(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


@pytest.mark.parametrize("loses", [lost_news, replaced_journal, moved_folder])
def test_a_holder_whose_files_are_not_those_that_others_look_at_renews_nothing(
    tmp_path: Path, take: Take, on: On, shared: bool, loses: Callable[[Path], None]
) -> None:
    folder = tmp_path / "state"
    first = take(folder, LONG_S)
    freeze(first)
    news = (folder / NEWS_NAME).read_bytes()
    loses(folder)
    lapse(first)
    with largest_file(NO_ROOM):
        assert not renew(first)
    assert first.state.is_fenced
    if loses is replaced_journal:
        assert not renew(first)
        assert (folder / NEWS_NAME).read_bytes() == news
    else:
        assert not (folder / NEWS_NAME).exists()
