"""One transaction of changes: all of them are written but those that SQLite refuses by themselves."""

import sqlite3
from collections.abc import Callable
from dataclasses import astuple, fields

from app.domain.breakpoints import TensorData
from app.domain.values import SessionId
from app.journal import tables
from app.journal.records import (
    TOKEN_BYTES,
    Change,
    Departed,
    Entry,
    Key,
    ResponseKey,
    ResponseRecord,
    SessionRecord,
    VectorKey,
    WriteBatch,
    describe,
)

COLUMNS = ", ".join(field.name for field in fields(SessionRecord))
PUT_SESSION = f"REPLACE INTO session ({COLUMNS}) VALUES ({', '.join('?' * len(fields(SessionRecord)))})"

Refused = dict[Key, str]
"""What was not written, and why."""
Fence = Callable[[sqlite3.Connection], None]


def write_batch(connection: sqlite3.Connection, batch: WriteBatch, fence: Fence) -> Refused:
    """Write each change of `batch` whole or not at all; returns those that cannot be written, such as one that is too
    large. Raises an exception, and writes nothing, if the file cannot be written, and what `fence` raises.
    """
    refused: Refused = {}
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        fence(connection)
        for key, entry in batch.items():
            connection.execute("SAVEPOINT change")
            try:
                _write_entry(connection, key, entry)
            except Exception as error:
                # The file itself cannot be written, or SQLite has rolled all of it back.
                is_the_files = isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError
                if is_the_files or not connection.in_transaction:
                    raise
                connection.execute("ROLLBACK TO change")
                refused[key] = str(error)
            connection.execute("RELEASE change")
    return refused


def _write_entry(connection: sqlite3.Connection, key: Key, entry: Entry) -> None:
    match key, entry:
        case _, Change() as change:
            _write_session(connection, change)
        case VectorKey() as vector, (TensorData() | None) as data:
            tables.put_vector(connection, vector, data)
        case ResponseKey() as response, (ResponseRecord() | None) as record:
            tables.put_response(connection, response, record)
        case str() as session, (Departed() | None) as departed:
            _delete_session(connection, session)
            if departed is not None:
                tables.put_home(connection, session, departed.home, departed.responses)
        case _:
            raise TypeError(f"{describe(key)} cannot have a {type(entry).__name__}")


def _delete_session(connection: sqlite3.Connection, session: SessionId) -> None:
    """Delete all that goes with a session, and note that it has come to its end here unless it is at home elsewhere."""
    connection.execute("DELETE FROM session WHERE id = ?", (session,))
    for table in ("tokens", "breakpoints", "breakpoint_vector", "intervention", "response", "keyed_request"):
        connection.execute(f"DELETE FROM {table} WHERE session = ?", (session,))
    connection.execute("UPDATE home SET state = 'closed' WHERE session = ? AND state != 'gone'", (session,))


def _write_session(connection: sqlite3.Connection, change: Change) -> None:
    session, position = change.record.id, change.position
    connection.execute(PUT_SESSION, astuple(change.record))
    connection.execute("DELETE FROM tokens WHERE session = ? AND position >= ?", (session, position))
    connection.execute(
        "UPDATE tokens SET ids = substr(ids, 1, (?2 - position) * ?3) "
        "WHERE session = ?1 AND position = (SELECT max(position) FROM tokens WHERE session = ?1) "
        "AND position + length(ids) / ?3 > ?2",
        (session, position, TOKEN_BYTES),
    )
    if change.token_ids:
        connection.execute("INSERT INTO tokens VALUES (?, ?, ?)", (session, position, change.token_ids))
    if change.breakpoints is not None:
        tables.put_breakpoints(connection, session, change.breakpoints)
    if change.interventions is not None:
        tables.put_interventions(connection, session, change.interventions)
    if change.home is not None:
        tables.put_home(connection, session, change.home)
    for record in change.keyed:
        tables.put_keyed(connection, record)
    for response in change.responses:
        tables.put_response(connection, ResponseKey(response.id), response)
