"""Journals of servers with a lease, on machines of their own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from app.domain.leases import Lease
from app.domain.values import SessionId
from app.journal import lease
from app.journal.journal import FILE_NAME, Journal
from app.journal.lease_table import find_lease
from tests.journal.building import model_info

ONE, TWO = SessionId("ses_1"), SessionId("ses_2")
LONG_S, SHORT_S = 3600.0, 1.0

On = Callable[[str], None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    """Go to another machine."""

    def go(machine: str) -> None:
        monkeypatch.setattr(lease, "machine_id", lambda: machine)

    go("one")
    return go


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
