"""What is said of a journal that a server cannot start with: what is wrong, and what to do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from app.domain.errors import FieldOutOfRange
from app.machine.files import explain

BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
OUT_OF_REACH = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
"""The disk has failed, or a quota is used up: the file may be as whole as ever."""


def unusable(path: Path, error: Exception) -> FieldOutOfRange:
    """SQLite, or a reader of its answers, raised `error`. Only some of SQLite's codes mean damage."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        advice = f"make room there. Files in {path.parent / 'kv'} may go: they cost time, and nothing else"
    elif code in BUSY:
        advice = "another program keeps it for itself; end that program, and start again"
    elif code in OUT_OF_REACH:
        advice = "look at its disk, which may be broken or have no room. Leave the file where it is: it may be whole"
    else:
        return damaged(path, str(error))
    return refusal(f"cannot open the journal {path}: {error}; {advice}")


def damaged(path: Path, why: str) -> FieldOutOfRange:
    """What is in the file is not what was written."""
    return refusal(
        f"Djinn cannot read the journal {path}: {why}; put back a copy of it, or move it away to start without the "
        "sessions in it"
    )


def no_news(path: Path, error: OSError) -> FieldOutOfRange:
    """The file of a lease's news cannot be read or made."""
    return refusal(
        f"cannot use {path}, where a server without room says that it lives: {explain(error)}; make room, make it "
        "readable and writable, or name another folder with --state-dir"
    )


def refusal(message: str) -> FieldOutOfRange:
    """A server cannot start with the journal in its `--state-dir`."""
    return FieldOutOfRange(message, param="state_dir")
