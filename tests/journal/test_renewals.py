"""A lease is renewed beside the journal where that has no room, and by nobody who has lost the folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from app.domain.errors import FieldOutOfRange
from app.domain.leases import NOBODYS
from app.journal import renewals
from app.journal.journal import FILE_NAME, Journal
from tests.file_sizes import largest_file
from tests.journal.leases import (
    LONG_S,
    SHORT_S,
    On,
    found,
    freeze,
    has_lost,
    is_fenced,
    lapse,
    on,
    renew,
    shared,
    started,
)

__all__ = ["on", "shared"]


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
