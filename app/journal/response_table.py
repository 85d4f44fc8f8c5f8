"""The journal's table of responses: what sessions have generated for clients that hold only a response's id."""

import sqlite3

from app.domain.values import SessionId
from app.journal.records import ResponseKey, ResponseRecord

TABLE = """
CREATE TABLE response (id TEXT PRIMARY KEY, session TEXT NOT NULL, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE INDEX response_of_session ON response (session);
"""


def put_response(connection: sqlite3.Connection, key: ResponseKey, record: ResponseRecord | None) -> None:
    """Write a response, or delete it."""
    if record is None:
        connection.execute("DELETE FROM response WHERE id = ?", (key.id,))
    else:
        connection.execute(
            "REPLACE INTO response VALUES (?, ?, CAST(? AS TEXT))", (record.id, record.session, record.body)
        )


def delete_responses(connection: sqlite3.Connection, session: SessionId) -> None:
    """Delete those of a session."""
    connection.execute("DELETE FROM response WHERE session = ?", (session,))


def load_responses(connection: sqlite3.Connection) -> list[ResponseRecord]:
    """Every response."""
    rows = connection.execute("SELECT id, session, CAST(body AS BLOB) FROM response ORDER BY id")
    return [ResponseRecord(response, SessionId(session), body) for response, session, body in rows]
