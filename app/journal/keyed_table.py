"""The journal's table of requests with an `Idempotency-Key` that have been done: a client that repeats one gets the
answer, and nothing is done twice.
"""

import json
import sqlite3
import time
from array import array
from dataclasses import asdict

from app.domain.values import FinishReason, SessionId, TurnUsage
from app.journal.records import DoneTurn, KeyedRecord

KEPT_S = 24 * 3600.0
MOST_KEYS = 4096
"""Of one tenant. The oldest are forgotten for new ones."""
TABLE = """
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


def delete_keyed(connection: sqlite3.Connection, session: SessionId) -> None:
    """Delete those that have opened the session, or had a turn in it."""
    connection.execute("DELETE FROM keyed_request WHERE session = ?", (session,))


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
