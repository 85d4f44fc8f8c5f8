"""A lease is renewed beside the journal where that has no room, and by nobody who has lost the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from app.domain.errors import FieldOutOfRange
from app.domain.leases import NOBODYS
from app.journal import renewals
from app.journal.journal import FILE_NAME, Journal
from tests.file_sizes import largest_file
from tests.journal.leases import LONG_S, SHORT_S, On, found, freeze, has_lost, is_fenced, on, shared, started

__all__ = ["on", "shared"]


NO_ROOM = renewals.SIZE
"""Bytes of the largest file: that of the news may be as large, and the journal has no room."""


def test_a_lease_is_renewed_where_the_journal_takes_nothing(tmp_path: Path, on: On, shared: bool) -> None:
    first = started(tmp_path, LONG_S)
    freeze(first)
    held = first.lease
    assert held is not None
    before = first._store.lease()
    assert before is not None
    held._tenure.ends_at = 0.0  # time has passed
    row = found(tmp_path)
    with largest_file(NO_ROOM):
        assert held._renew()
    held.require()
    assert found(tmp_path) == row
    assert first._store.lease() != before
    assert not first._store.take_lease(before, before.next("another", "two", LONG_S))
    assert held._renew()
    assert found(tmp_path) == row.renewed()
    first.close()


def test_a_holder_without_room_learns_that_it_has_lost_the_folder(tmp_path: Path, on: On, shared: bool) -> None:
    first = Journal(tmp_path, SHORT_S)
    assert first.lease is not None
    freeze(first)
    on("two")
    second = Journal(tmp_path, LONG_S)
    news = second._store.lease()
    with largest_file(NO_ROOM):
        assert not first.lease._renew()
    assert has_lost(first)
    assert second._store.lease() == news
    second.close()
    first.close()


def test_news_need_the_file_that_others_look_at(tmp_path: Path, on: On) -> None:
    journal = Journal(tmp_path, LONG_S)
    assert journal.lease is not None
    freeze(journal)
    (tmp_path / renewals.NAME).unlink()
    with largest_file(NO_ROOM):
        assert not journal.lease._renew()
    assert not (tmp_path / renewals.NAME).exists()
    journal.close()


def test_a_holder_whose_journal_was_replaced_renews_nothing(tmp_path: Path, on: On, shared: bool) -> None:
    first = Journal(tmp_path, LONG_S)
    held = first.lease
    assert held is not None
    freeze(first)
    copy = tmp_path / "copy"
    shutil.copy(tmp_path / FILE_NAME, copy)
    copy.replace(tmp_path / FILE_NAME)
    news = (tmp_path / renewals.NAME).read_bytes()
    held._tenure.ends_at = 0.0  # time has passed
    with largest_file(NO_ROOM):
        assert not held._renew()
    assert not held._renew()
    assert is_fenced(first)
    assert (tmp_path / renewals.NAME).read_bytes() == news
    first.close()


def test_a_journal_that_may_not_be_written_is_not_taken_for_a_full_disk(tmp_path: Path, on: On, shared: bool) -> None:
    first = Journal(tmp_path, LONG_S)
    held = first.lease
    assert held is not None
    freeze(first)
    news = (tmp_path / renewals.NAME).read_bytes()
    held._connection.execute("PRAGMA query_only = ON")
    held._tenure.ends_at = 0.0  # time has passed
    assert not held._renew()
    assert is_fenced(first)
    assert (tmp_path / renewals.NAME).read_bytes() == news
    first.close()


def test_a_holder_whose_folder_was_moved_renews_nothing(tmp_path: Path, on: On, shared: bool) -> None:
    first = Journal(tmp_path / "state", LONG_S)
    assert first.lease is not None
    freeze(first)
    (tmp_path / "state").rename(tmp_path / "moved")
    first.lease._tenure.ends_at = 0.0  # time has passed
    assert not first.lease._renew()
    assert is_fenced(first)
    first.close()


@pytest.mark.parametrize("room", [0, renewals.SIZE - 1])
def test_a_lease_without_room_for_news_is_not_taken(tmp_path: Path, on: On, shared: bool, room: int) -> None:
    Journal(tmp_path).close()
    with (
        largest_file(room),
        pytest.raises(FieldOutOfRange, match=r"cannot use .*/renewals, .*: File too large; make room"),
    ):
        Journal(tmp_path, LONG_S)
    assert found(tmp_path) == NOBODYS
    journal = Journal(tmp_path, LONG_S)
    assert journal.lease is not None
    freeze(journal)
    with largest_file(NO_ROOM):
        assert journal.lease._renew()
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
