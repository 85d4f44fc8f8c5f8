"""The journal's table of sessions that have moved between servers."""

import sqlite3

from app.domain.homes import MOST_KEPT, Home, HomeState
from app.domain.values import SessionId

TABLE = """
CREATE TABLE home (
    session TEXT PRIMARY KEY, state TEXT NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL, peer TEXT NOT NULL,
    peer_seq INTEGER NOT NULL, owner TEXT
) STRICT, WITHOUT ROWID;
CREATE INDEX home_seq ON home (seq);
"""


def put_home(connection: sqlite3.Connection, session: SessionId, home: Home | None) -> None:
    """Write where a session is, and forget those that went long ago. None: it has never moved."""
    if home is None:
        connection.execute("DELETE FROM home WHERE session = ?", (session,))
        return
    fields = (home.state, home.epoch, home.seq, home.peer, home.peer_seq, home.owner)
    connection.execute("REPLACE INTO home VALUES (?, ?, ?, ?, ?, ?, ?)", (session, *fields))
    connection.execute("DELETE FROM home WHERE seq <= ? AND state IN ('gone', 'closed')", (home.seq - MOST_KEPT,))


def close_home(connection: sqlite3.Connection, session: SessionId) -> None:
    """Note that a session has come to its end here."""
    connection.execute("UPDATE home SET state = 'closed' WHERE session = ? AND state != 'gone'", (session,))


def load_homes(connection: sqlite3.Connection) -> dict[SessionId, Home]:
    """All of them. Raises `ValueError` for a state that there is not."""
    rows = connection.execute("SELECT session, state, epoch, seq, peer, peer_seq, owner FROM home")
    return {SessionId(session): Home(HomeState(state), *fields) for session, state, *fields in rows}
