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
    return _refusal(f"cannot open the journal {path}: {error}; {advice}")


def damaged(path: Path, why: str) -> FieldOutOfRange:
    """What is in the file is not what was written."""
    return _refusal(
        f"Djinn cannot read the journal {path}: {why}; put back a copy of it, or move it away to start without the "
        "sessions in it"
    )


def of_another_version(path: Path, found: int, oldest: int, newest: int) -> FieldOutOfRange:
    """The file is of format `found`; this version reads those from `oldest` to `newest`."""
    age = "a newer" if found > newest else "an older"
    return _refusal(
        f"the journal {path} was written by {age} version of Djinn: its format is {found}, this version reads {oldest} "
        f"to {newest}. It is not damaged. Go on with that version, put back a backup that this version wrote, name "
        "another folder with --state-dir, or move the file away to start without its sessions"
    )


def of_another_model(folder: Path, held: str, theirs: tuple[object, ...], ours: tuple[object, ...]) -> FieldOutOfRange:
    """`held` is what the folder has. A model is its name, vocabulary, layers and width."""
    sizes = "vocabulary {1}, {2} layers of {3}"
    return _refusal(
        f"the {held} in {folder} are those of model {theirs[0]!r} ({sizes.format(*theirs)}), not of {ours[0]!r} "
        f"({sizes.format(*ours)}); serve that model, or name another folder with --state-dir"
    )


def unwritable(path: Path, error: OSError) -> FieldOutOfRange:
    """The system does not let the server write to the file."""
    return _refusal(
        f"cannot write the journal {path}: {explain(error)}; make it writable, or name another folder with --state-dir"
    )


def no_news(path: Path, error: OSError) -> FieldOutOfRange:
    """The file of a lease's news cannot be read or made."""
    return _refusal(
        f"cannot use {path}, where a server without room says that it lives: {explain(error)}; make room, make it "
        "readable and writable, or name another folder with --state-dir"
    )


def not_kept(path: Path, found: int, newest: int, error: Exception) -> FieldOutOfRange:
    """The file of format `found` could not be copied before it becomes one of `newest`."""
    return _refusal(
        f"the journal {path} is of format {found}, and stays so: the server copies it before it converts it to "
        f"format {newest}. But {error}; make room for the copy"
    )


def _refusal(message: str) -> FieldOutOfRange:
    return FieldOutOfRange(message, param="state_dir")
