"""The journal's tables of what breakpoints need: each session's steering, and every owner's vectors."""

import sqlite3

from app.domain.breakpoints import TensorData
from app.domain.values import SessionId
from app.journal.records import VectorKey
from app.journal.steering import NO_STEERING, Steering

TABLES = """
CREATE TABLE steering (session TEXT PRIMARY KEY, steering TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE vector (
    owner TEXT NOT NULL, name TEXT NOT NULL, dtype TEXT NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (owner, name)
) STRICT, WITHOUT ROWID;
"""
"""`owner` is '' on a server without keys: a primary key has no NULL."""


def put_steering(connection: sqlite3.Connection, session: SessionId, steering: Steering) -> None:
    """Write a session's steering; most sessions have none, and no row."""
    delete_steering(connection, session)
    if steering != NO_STEERING:
        connection.execute("INSERT INTO steering VALUES (?, ?)", (session, steering.to_json()))


def delete_steering(connection: sqlite3.Connection, session: SessionId) -> None:
    """Delete a session's steering, if it has any."""
    connection.execute("DELETE FROM steering WHERE session = ?", (session,))


def load_steering(connection: sqlite3.Connection) -> dict[SessionId, Steering]:
    """That of every session that has some. Raises `ValueError` for what is not steering."""
    rows = connection.execute("SELECT session, steering FROM steering")
    return {SessionId(session): Steering.from_json(text) for session, text in rows}


def put_vector(connection: sqlite3.Connection, key: VectorKey, tensor: TensorData | None) -> None:
    """Write a vector, or delete it."""
    connection.execute("DELETE FROM vector WHERE owner = ? AND name = ?", (key.owner or "", key.name))
    if tensor is not None:
        (size,) = tensor.shape
        row = (key.owner or "", key.name, tensor.dtype, size, tensor.data)
        connection.execute("INSERT INTO vector VALUES (?, ?, ?, ?, ?)", row)


def load_vectors(connection: sqlite3.Connection) -> dict[VectorKey, TensorData]:
    """Every owner's vectors."""
    rows = connection.execute("SELECT owner, name, dtype, size, data FROM vector")
    return {VectorKey(owner or None, name): TensorData(dtype, (size,), data) for owner, name, dtype, size, data in rows}
