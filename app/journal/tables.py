"""The journal's tables, and one transaction of changes to them: all are written but those that SQLite refuses.

A vector that several rows use is stored once.
"""

import json
import sqlite3
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, fields

from app.domain.activations import Dictionary, StoredProbe, Translators, Upload, UploadKey, UploadKind
from app.domain.breakpoints import Breakpoint, Intervention, Swap, TensorData, TensorTable
from app.domain.homes import MOST_KEPT, Home, Homes, HomeState
from app.domain.values import FinishReason, SessionId, TurnUsage
from app.journal.records import (
    TOKEN_BYTES,
    UPLOADS,
    Change,
    Departed,
    DoneTurn,
    Entry,
    Identity,
    InterventionChange,
    Key,
    KeyedRecord,
    ResponseKey,
    ResponseRecord,
    SessionRecord,
    Steering,
    WriteBatch,
    describe,
    from_json,
    to_json,
)

TENSOR_TABLE = "CREATE TABLE tensor (digest BLOB PRIMARY KEY, data BLOB NOT NULL) STRICT;"


def references(*tables: str) -> str:
    """SQL for `tables`, whose column `tensor` is a digest or NULL: a tensor goes with the last row that has it."""
    unused = " AND ".join(f"NOT EXISTS (SELECT 1 FROM {table} WHERE tensor = old.tensor)" for table in tables)
    let_go = f"BEGIN DELETE FROM tensor WHERE digest = old.tensor AND {unused}; END;"
    return "\n".join(
        f"CREATE INDEX {table}_tensor ON {table} (tensor) WHERE tensor IS NOT NULL;\n"
        f"CREATE TRIGGER {table}_deleted AFTER DELETE ON {table} {let_go}\n"
        f"CREATE TRIGGER {table}_changed AFTER UPDATE OF tensor ON {table} WHEN old.tensor IS NOT new.tensor {let_go}"
        for table in tables
    )


DIGEST_BYTES = 32
"""Of a tensor: long enough that no tenant finds another's."""


def _put_tensors(connection: sqlite3.Connection, tensors: TensorTable) -> None:
    """Write those that are not there yet. A row that refers to each must be written in the same transaction."""
    for digest, data in tensors.data.items():
        if connection.execute("SELECT 1 FROM tensor WHERE digest = ?", (digest,)).fetchone() is None:
            connection.execute("INSERT INTO tensor VALUES (?, ?)", (digest, data))


BREAKPOINT_TABLES = f"""
{TENSOR_TABLE}
CREATE TABLE breakpoints (session TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE breakpoint_vector (
    session TEXT NOT NULL, tensor BLOB NOT NULL, PRIMARY KEY (session, tensor)
) STRICT, WITHOUT ROWID;
CREATE TABLE intervention (
    session TEXT NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, tensor BLOB, PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE upload (
    owner TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL, tensor BLOB,
    PRIMARY KEY (owner, kind, name)
) STRICT, WITHOUT ROWID;
{references("breakpoint_vector", "intervention", "upload")}
"""
"""`owner` is '' on a server without keys: a primary key has no NULL. The `body` of a vector is its dtype and shape, and
its numbers are `tensor`. Others have a file, which their `body` names.
"""


def put_breakpoints(connection: sqlite3.Connection, session: SessionId, armed: tuple[Breakpoint, ...]) -> None:
    """Write a session's breakpoints in the place of those that it had; most sessions have none, and no row."""
    tensors = TensorTable(digest_size=DIGEST_BYTES)
    body = to_json(Breakpoint, armed, tensors.put)
    _put_tensors(connection, tensors)
    used = tensors.data.keys()
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
    tensors = TensorTable(digest_size=DIGEST_BYTES)
    for number, made in change.rows.items():
        vector = made.edit.vector
        tensor = None if vector is None else tensors.put(vector.data)
        connection.execute(
            "INSERT INTO intervention VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET body = excluded.body, tensor = excluded.tensor",
            (session, number, to_json(Intervention, [made], tensors.put), tensor),
        )
    _put_tensors(connection, tensors)
    connection.execute("DELETE FROM intervention WHERE session = ? AND number >= ?", (session, change.count))


def load_steering(connection: sqlite3.Connection) -> dict[SessionId, Steering]:
    """That of every session that has some. Raises `ValueError` for what is not steering."""
    data = _data_of(connection)
    rows = connection.execute("SELECT session, body FROM breakpoints")
    armed = {SessionId(session): from_json(Breakpoint, body, data) for session, body in rows}
    made: defaultdict[SessionId, list[Intervention]] = defaultdict(list)
    for session, number, body in connection.execute(
        "SELECT session, number, body FROM intervention ORDER BY session, number"
    ):
        if number != len(made[session]):
            raise ValueError(f"intervention {len(made[session])} of session {session} is missing")
        (one,) = from_json(Intervention, body, data)
        made[session].append(one)
    return {each: Steering(armed.get(each, ()), tuple(made.get(each, ()))) for each in armed.keys() | made.keys()}


def put_upload(connection: sqlite3.Connection, key: UploadKey, upload: Upload | None) -> None:
    """Write an upload, or delete it."""
    place = key.owner or "", key.kind, key.name
    if upload is None:
        connection.execute("DELETE FROM upload WHERE owner = ? AND kind = ? AND name = ?", place)
        return
    tensors, tensor = TensorTable(digest_size=DIGEST_BYTES), None
    if isinstance(upload, TensorData):
        body, tensor = json.dumps({"dtype": upload.dtype, "shape": upload.shape}), tensors.put(upload.data)
    else:
        body = UPLOADS[key.kind].dump_json(upload).decode()
    connection.execute(
        "INSERT INTO upload VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT DO UPDATE SET body = excluded.body, tensor = excluded.tensor",
        (*place, body, tensor),
    )
    _put_tensors(connection, tensors)


def load_uploads(connection: sqlite3.Connection) -> dict[UploadKey, Upload]:
    """Every owner's uploads. Raises `ValueError` if the numbers of a vector are missing, or a body is none."""
    data, found = _data_of(connection), dict[UploadKey, Upload]()
    for owner, name_of_kind, name, body, tensor in connection.execute(
        "SELECT owner, kind, name, body, tensor FROM upload"
    ):
        kind = UploadKind(name_of_kind)
        if kind is UploadKind.VECTOR:
            said = json.loads(body)
            found[UploadKey(owner or None, kind, name)] = TensorData(said["dtype"], tuple(said["shape"]), data(tensor))
        else:
            found[UploadKey(owner or None, kind, name)] = UPLOADS[kind].validate_json(body)
    return found


def _data_of(connection: sqlite3.Connection) -> Swap:
    tensors: dict[bytes, bytes] = dict(connection.execute("SELECT digest, data FROM tensor"))

    def data(digest: bytes) -> bytes:
        if digest not in tensors:
            raise ValueError(f"tensor {digest.hex()} is missing")
        return tensors[digest]

    return data


HOME_TABLES = """
CREATE TABLE home (
    session TEXT PRIMARY KEY, state TEXT NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL, peer TEXT NOT NULL,
    peer_seq INTEGER NOT NULL, owner TEXT, name TEXT, peer_journal TEXT NOT NULL DEFAULT ''
) STRICT, WITHOUT ROWID;
CREATE INDEX home_seq ON home (seq);
CREATE TABLE response_gone (response TEXT PRIMARY KEY, session TEXT NOT NULL, seq INTEGER NOT NULL)
STRICT, WITHOUT ROWID;
CREATE INDEX response_gone_seq ON response_gone (seq);
"""


def put_home(connection: sqlite3.Connection, session: SessionId, home: Home | None, gone: Iterable[str] = ()) -> None:
    """Write where a session is, and which responses have `gone` with it; forget those that went long ago. None: it has
    never moved.
    """
    if home is None:
        connection.execute("DELETE FROM home WHERE session = ?", (session,))
        return
    fields = (home.state, home.epoch, home.seq, home.peer, home.peer_seq, home.owner, home.name, home.peer_journal)
    connection.execute("REPLACE INTO home VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (session, *fields))
    old = home.seq - MOST_KEPT
    connection.execute("DELETE FROM home WHERE seq <= ? AND state IN ('gone', 'closed')", (old,))
    connection.execute("DELETE FROM response_gone WHERE seq <= ?", (old,))
    rows = ((response, session, home.seq) for response in gone)
    connection.executemany("REPLACE INTO response_gone VALUES (?, ?, ?)", rows)


def load_homes(connection: sqlite3.Connection) -> Homes:
    """All of them. Raises `ValueError` for a state that there is not."""
    rows = connection.execute("SELECT session, state, epoch, seq, peer, peer_seq, owner, name, peer_journal FROM home")
    known = {SessionId(session): Home(HomeState(state), *fields) for session, state, *fields in rows}
    gone = connection.execute("SELECT response, session FROM response_gone ORDER BY seq")
    return Homes(known, [(response, SessionId(session)) for response, session in gone])


IDENTITY_TABLE = """
CREATE TABLE identity (
    id INTEGER PRIMARY KEY CHECK (id = 1), uuid TEXT NOT NULL, starts INTEGER NOT NULL, attempt TEXT NOT NULL
) STRICT;
INSERT INTO identity SELECT 1, lower(
    substr(word, 1, 8) || '-' || substr(word, 9, 4) || '-4' || substr(word, 13, 3) || '-a' || substr(word, 16, 3) || '-'
    || substr(word, 19, 12)), 0, '' FROM (SELECT hex(randomblob(16)) AS word);
"""
"""A random UUID (RFC 9562, version 4)."""


def load_identity(connection: sqlite3.Connection) -> Identity | None:
    """Which journal it is; None: its format is one that had no identity yet."""
    if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'identity'").fetchone() is None:
        return None
    return Identity(*connection.execute("SELECT uuid, starts, attempt FROM identity").fetchone())


RESPONSE_TABLE = """
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


def load_responses(connection: sqlite3.Connection) -> list[ResponseRecord]:
    """Every response."""
    rows = connection.execute("SELECT id, session, CAST(body AS BLOB) FROM response ORDER BY id")
    return [ResponseRecord(response, SessionId(session), body) for response, session, body in rows]


API_KEY_TABLE = """
CREATE TABLE api_key (name TEXT PRIMARY KEY, salt BLOB NOT NULL, digest BLOB NOT NULL) STRICT, WITHOUT ROWID;
"""
"""Which key of `--api-keys` had which name. `digest` is that of the key's SHA-256 digest with the salt."""
KEPT_S = 24 * 3600.0
MOST_KEYS = 4096
"""Of one tenant. The oldest are forgotten for new ones."""
KEYED_TABLE = """
CREATE TABLE keyed_request (
    owner TEXT NOT NULL, key TEXT NOT NULL, digest BLOB NOT NULL, at REAL NOT NULL, session TEXT NOT NULL,
    response TEXT, turn TEXT, token_ids BLOB, PRIMARY KEY (owner, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX keyed_request_session ON keyed_request (session);
CREATE INDEX keyed_request_at ON keyed_request (owner, at);
"""
"""`owner` is '' on a server without keys: a primary key has no NULL."""


def put_keyed(connection: sqlite3.Connection, record: KeyedRecord) -> None:
    """Write a request that has been done, and forget old ones of its owner."""
    owner, turn = record.owner or "", record.turn
    said = None if turn is None else json.dumps({"reason": turn.reason, "usage": asdict(turn.usage)})
    token_ids = None if turn is None else array("I", turn.token_ids).tobytes()
    fields = (owner, record.key, record.digest, record.at, record.session, record.response, said, token_ids)
    connection.execute("REPLACE INTO keyed_request VALUES (?, ?, ?, ?, ?, ?, ?, ?)", fields)
    connection.execute("DELETE FROM keyed_request WHERE owner = ? AND at < ?", (owner, record.at - KEPT_S))
    connection.execute(
        "DELETE FROM keyed_request WHERE owner = ?1 AND at <= "
        "(SELECT at FROM keyed_request WHERE owner = ?1 ORDER BY at DESC LIMIT 1 OFFSET ?2)",
        (owner, MOST_KEYS),
    )


def load_keyed(connection: sqlite3.Connection) -> list[KeyedRecord]:
    """Those of the last day, the oldest first. Raises `ValueError` for what is none."""
    rows = connection.execute(
        "SELECT owner, key, digest, at, session, response, turn, token_ids FROM keyed_request "
        "WHERE at >= ? ORDER BY at",
        (time.time() - KEPT_S,),
    )
    return [
        KeyedRecord(owner or None, key, digest, at, SessionId(session), response, _turn(turn, token_ids))
        for owner, key, digest, at, session, response, turn, token_ids in rows
    ]


def _turn(text: str | None, token_ids: bytes | None) -> DoneTurn | None:
    if text is None or token_ids is None:
        return None
    said, tokens = json.loads(text), array("I")
    tokens.frombytes(token_ids)
    return DoneTurn(tuple(tokens), FinishReason(said["reason"]), TurnUsage(**said["usage"]))


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
        case UploadKey() as upload, (TensorData() | Dictionary() | Translators() | StoredProbe() | None) as given:
            put_upload(connection, upload, given)
        case ResponseKey() as response, (ResponseRecord() | None) as record:
            put_response(connection, response, record)
        case str() as session, (Departed() | None) as departed:
            _delete_session(connection, session)
            if departed is not None:
                put_home(connection, session, departed.home, departed.responses)
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
        put_breakpoints(connection, session, change.breakpoints)
    if change.interventions is not None:
        put_interventions(connection, session, change.interventions)
    if change.home is not None:
        put_home(connection, session, change.home)
    for record in change.keyed:
        put_keyed(connection, record)
    for response in change.responses:
        put_response(connection, ResponseKey(response.id), response)
