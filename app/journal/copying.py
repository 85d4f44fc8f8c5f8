"""A copy of the journal, also while a server writes to it."""

import sqlite3
from pathlib import Path
from urllib.parse import quote

from app.domain.errors import FieldOutOfRange
from app.machine.files import make_private


def copy_journal(source: Path, target: Path) -> int:
    """Make `target` a copy of the journal `source`, as it is at one moment; returns how many sessions are in it.

    All that a server has answered by then is there. The server goes on meanwhile. Raises `FieldOutOfRange` if either
    cannot be read or written, or if the journal is damaged.
    """
    make_private(target)
    try:
        reading = sqlite3.connect(f"file:{quote(str(source))}?mode=rw", uri=True)
        writing = sqlite3.connect(target)
        try:
            reading.backup(writing)  # in one step: a reader delays no writer
            with writing:
                writing.execute("DROP TABLE IF EXISTS lease")  # the server that has the one does not have the other
            (found,) = writing.execute("PRAGMA quick_check(1)").fetchone()
            (sessions,) = writing.execute("SELECT count(*) FROM session").fetchone()
        finally:
            writing.close()
            reading.close()
    except sqlite3.Error as error:
        raise FieldOutOfRange(f"the journal {source} cannot be copied to {target}: {error}") from error
    if found != "ok":
        raise FieldOutOfRange(f"the journal {source} is damaged: {found}")
    return int(sessions)
