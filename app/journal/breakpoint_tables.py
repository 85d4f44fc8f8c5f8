"""The journal's tables of what breakpoints need: each session's breakpoints and interventions, every owner's vectors.

A vector that several of them use is stored once.
"""

import sqlite3
from collections import defaultdict

from app.domain.breakpoints import Breakpoint, Intervention, TensorData
from app.domain.tensor_swaps import Swap
from app.domain.values import SessionId
from app.journal.records import VectorKey
from app.journal.steering import (
    InterventionChange,
    Steering,
    breakpoints_from_json,
    breakpoints_to_json,
    intervention_from_json,
    intervention_to_json,
)
from app.journal.tensor_table import TABLE as TENSOR_TABLE
from app.journal.tensor_table import TensorPutter, load_tensors, references

TABLES = f"""
{TENSOR_TABLE}
CREATE TABLE breakpoints (session TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE breakpoint_vector (
    session TEXT NOT NULL, tensor BLOB NOT NULL, PRIMARY KEY (session, tensor)
) STRICT, WITHOUT ROWID;
CREATE TABLE intervention (
    session TEXT NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, tensor BLOB, PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE vector (
    owner TEXT NOT NULL, name TEXT NOT NULL, dtype TEXT NOT NULL, size INTEGER NOT NULL, tensor BLOB NOT NULL,
    PRIMARY KEY (owner, name)
) STRICT, WITHOUT ROWID;
{references("breakpoint_vector", "intervention", "vector")}
"""
"""`owner` is '' on a server without keys: a primary key has no NULL."""


def put_breakpoints(connection: sqlite3.Connection, session: SessionId, armed: tuple[Breakpoint, ...]) -> None:
    """Write a session's breakpoints in the place of those that it had; most sessions have none, and no row."""
    tensors, used = TensorPutter(connection), set[bytes]()

    def put(data: bytes) -> bytes:
        digest = tensors.put(data)
        used.add(digest)
        return digest

    body = breakpoints_to_json(armed, put)
    known = "SELECT tensor FROM breakpoint_vector WHERE session = ?"
    before = {tensor for (tensor,) in connection.execute(known, (session,))}
    new, gone = (((session, tensor) for tensor in each) for each in (used - before, before - used))
    connection.executemany("INSERT INTO breakpoint_vector VALUES (?, ?)", new)
    connection.executemany("DELETE FROM breakpoint_vector WHERE session = ? AND tensor = ?", gone)
    connection.execute("DELETE FROM breakpoints WHERE session = ?", (session,))
    if armed:
        connection.execute("INSERT INTO breakpoints VALUES (?, ?)", (session, body))


def put_interventions(connection: sqlite3.Connection, session: SessionId, change: InterventionChange) -> None:
    """Write what has changed of a session's interventions."""
    tensors = TensorPutter(connection)
    for number, made in change.rows.items():
        vector = made.edit.vector
        tensor = None if vector is None else tensors.put(vector.data)
        connection.execute(
            "INSERT INTO intervention VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET body = excluded.body, tensor = excluded.tensor",
            (session, number, intervention_to_json(made, tensors.put), tensor),
        )
    connection.execute("DELETE FROM intervention WHERE session = ? AND number >= ?", (session, change.count))


def delete_steering(connection: sqlite3.Connection, session: SessionId) -> None:
    """Delete a session's breakpoints and interventions, if it has any."""
    for table in ("breakpoints", "breakpoint_vector", "intervention"):
        connection.execute(f"DELETE FROM {table} WHERE session = ?", (session,))


def load_steering(connection: sqlite3.Connection) -> dict[SessionId, Steering]:
    """That of every session that has some. Raises `ValueError` for what is not steering."""
    data = _data_of(connection)
    rows = connection.execute("SELECT session, body FROM breakpoints")
    armed = {SessionId(session): breakpoints_from_json(body, data) for session, body in rows}
    made: defaultdict[SessionId, list[Intervention]] = defaultdict(list)
    for session, number, body in connection.execute(
        "SELECT session, number, body FROM intervention ORDER BY session, number"
    ):
        if number != len(made[session]):
            raise ValueError(f"intervention {len(made[session])} of session {session} is missing")
        made[session].append(intervention_from_json(body, data))
    return {each: Steering(armed.get(each, ()), tuple(made.get(each, ()))) for each in armed.keys() | made.keys()}


def put_vector(connection: sqlite3.Connection, key: VectorKey, vector: TensorData | None) -> None:
    """Write a vector, or delete it."""
    if vector is None:
        connection.execute("DELETE FROM vector WHERE owner = ? AND name = ?", (key.owner or "", key.name))
        return
    (size,) = vector.shape
    connection.execute(
        "INSERT INTO vector VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT DO UPDATE SET dtype = excluded.dtype, size = excluded.size, tensor = excluded.tensor",
        (key.owner or "", key.name, vector.dtype, size, TensorPutter(connection).put(vector.data)),
    )


def load_vectors(connection: sqlite3.Connection) -> dict[VectorKey, TensorData]:
    """Every owner's vectors. Raises `ValueError` if one is missing."""
    data = _data_of(connection)
    rows = connection.execute("SELECT owner, name, dtype, size, tensor FROM vector")
    return {
        VectorKey(owner or None, name): TensorData(dtype, (size,), data(tensor))
        for owner, name, dtype, size, tensor in rows
    }


def _data_of(connection: sqlite3.Connection) -> Swap:
    tensors = load_tensors(connection)

    def data(digest: bytes) -> bytes:
        if digest not in tensors:
            raise ValueError(f"tensor {digest.hex()} is missing")
        return tensors[digest]

    return data
