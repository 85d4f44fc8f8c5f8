"""The journal's tables of sessions that have moved between servers, and of the responses that went with them."""

import sqlite3
from collections.abc import Iterable

from app.domain.homes import MOST_KEPT, Home, Homes, HomeState
from app.domain.values import SessionId

TABLE = """
CREATE TABLE home (
    session TEXT PRIMARY KEY, state TEXT NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL, peer TEXT NOT NULL,
    peer_seq INTEGER NOT NULL, owner TEXT, name TEXT
) STRICT, WITHOUT ROWID;
CREATE INDEX home_seq ON home (seq);
CREATE TABLE response_gone (response TEXT PRIMARY KEY, session TEXT NOT NULL, seq INTEGER NOT NULL)
STRICT, WITHOUT ROWID;
CREATE INDEX response_gone_seq ON response_gone (seq);
"""


def put_home(connection: sqlite3.Connection, session: SessionId, home: Home | None) -> None:
    """Write where a session is, and forget those that went long ago. None: it has never moved."""
    if home is None:
        connection.execute("DELETE FROM home WHERE session = ?", (session,))
        return
    fields = (home.state, home.epoch, home.seq, home.peer, home.peer_seq, home.owner, home.name)
    connection.execute("REPLACE INTO home VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (session, *fields))
    old = home.seq - MOST_KEPT
    connection.execute("DELETE FROM home WHERE seq <= ? AND state IN ('gone', 'closed')", (old,))
    connection.execute("DELETE FROM response_gone WHERE seq <= ?", (old,))


def put_gone_responses(
    connection: sqlite3.Connection, session: SessionId, home: Home, responses: Iterable[str]
) -> None:
    """Write which responses have gone with a session."""
    rows = ((response, session, home.seq) for response in responses)
    connection.executemany("REPLACE INTO response_gone VALUES (?, ?, ?)", rows)


def close_home(connection: sqlite3.Connection, session: SessionId) -> None:
    """Note that a session has come to its end here."""
    connection.execute("UPDATE home SET state = 'closed' WHERE session = ? AND state != 'gone'", (session,))


def load_homes(connection: sqlite3.Connection) -> Homes:
    """All of them. Raises `ValueError` for a state that there is not."""
    rows = connection.execute("SELECT session, state, epoch, seq, peer, peer_seq, owner, name FROM home")
    known = {SessionId(session): Home(HomeState(state), *fields) for session, state, *fields in rows}
    gone = connection.execute("SELECT response, session FROM response_gone ORDER BY seq")
    return Homes(known, [(response, SessionId(session)) for response, session in gone])
