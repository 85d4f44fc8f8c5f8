"""Copies of a journal, journals of earlier versions that become ones of this, and earlier names of keys."""

import contextlib
import hashlib
import logging
import secrets
import sqlite3
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from urllib.parse import quote

from app.domain.errors import FieldOutOfRange
from app.journal.tables import Fence
from app.machine.files import make_private, sync

logger = logging.getLogger(__name__)


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


def _lets_go(table: str) -> tuple[str, ...]:
    """What format 10 has instead of earlier triggers of `table`: a tensor goes with the last row that refers to it."""
    unused = " AND ".join(
        f"NOT EXISTS (SELECT 1 FROM {each} WHERE tensor = old.tensor)"
        for each in ("breakpoint_vector", "intervention", "upload")
    )
    let_go = f"BEGIN DELETE FROM tensor WHERE digest = old.tensor AND {unused}; END"
    return (
        f"DROP TRIGGER IF EXISTS {table}_deleted",
        f"DROP TRIGGER IF EXISTS {table}_changed",
        f"CREATE TRIGGER {table}_deleted AFTER DELETE ON {table} {let_go}",
        f"CREATE TRIGGER {table}_changed AFTER UPDATE OF tensor ON {table} WHEN old.tensor IS NOT new.tensor {let_go}",
    )


OLDEST = 4
"""The oldest format that this version reads."""
STEPS: tuple[tuple[str, ...], ...] = (
    (
        "ALTER TABLE session ADD COLUMN forked_from TEXT",
        "ALTER TABLE session ADD COLUMN forked_tokens INTEGER",
        "UPDATE session SET usage = json_set(usage, '$.last', NULL)",
    ),
    ("ALTER TABLE session ADD COLUMN namespace TEXT",),
    (
        "CREATE TABLE home (session TEXT PRIMARY KEY, state TEXT NOT NULL, epoch INTEGER NOT NULL, "
        "seq INTEGER NOT NULL, peer TEXT NOT NULL, peer_seq INTEGER NOT NULL, owner TEXT) STRICT, WITHOUT ROWID",
        "CREATE INDEX home_seq ON home (seq)",
    ),
    (
        "ALTER TABLE home ADD COLUMN name TEXT",
        "CREATE TABLE response_gone (response TEXT PRIMARY KEY, session TEXT NOT NULL, seq INTEGER NOT NULL) "
        "STRICT, WITHOUT ROWID",
        "CREATE INDEX response_gone_seq ON response_gone (seq)",
    ),
    (
        "CREATE TABLE api_key (name TEXT PRIMARY KEY, salt BLOB NOT NULL, digest BLOB NOT NULL) STRICT, WITHOUT ROWID",
        "CREATE TABLE keyed_request (owner TEXT NOT NULL, key TEXT NOT NULL, digest BLOB NOT NULL, at REAL NOT NULL, "
        "session TEXT NOT NULL, response TEXT, turn TEXT, token_ids BLOB, PRIMARY KEY (owner, key)) "
        "STRICT, WITHOUT ROWID",
        "CREATE INDEX keyed_request_session ON keyed_request (session)",
        "CREATE INDEX keyed_request_at ON keyed_request (owner, at)",
    ),
    (
        "CREATE TABLE identity (id INTEGER PRIMARY KEY CHECK (id = 1), uuid TEXT NOT NULL, starts INTEGER NOT NULL, "
        "attempt TEXT NOT NULL) STRICT",
        "INSERT INTO identity SELECT 1, lower(substr(word, 1, 8) || '-' || substr(word, 9, 4) || '-4' || "
        "substr(word, 13, 3) || '-a' || substr(word, 16, 3) || '-' || substr(word, 19, 12)), 0, '' "
        "FROM (SELECT hex(randomblob(16)) AS word)",
        "ALTER TABLE home ADD COLUMN peer_journal TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE session ADD COLUMN adapter TEXT",
        "ALTER TABLE session ADD COLUMN adapter_digest TEXT",
        "CREATE TABLE upload (owner TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL, "
        "tensor BLOB, PRIMARY KEY (owner, kind, name)) STRICT, WITHOUT ROWID",
        "INSERT INTO upload SELECT owner, 'vector', name, json_object('dtype', dtype, 'shape', json_array(size)), "
        "tensor FROM vector",
        "DROP TABLE vector",
        "CREATE INDEX upload_tensor ON upload (tensor) WHERE tensor IS NOT NULL",
        *_lets_go("breakpoint_vector"),
        *_lets_go("intervention"),
        *_lets_go("upload"),
    ),
)
"""The first makes format `OLDEST` one newer, and so on. A step never changes once it has been released."""
FORMAT = OLDEST + len(STEPS)
"""What this version writes."""


def bring_up_to_date(connection: sqlite3.Connection, path: Path, fence: Fence) -> None:
    """Make the journal at `path`, of format `OLDEST` at least, one of `FORMAT`: whole, or not at all. As it was, it is
    kept beside it: the way back to the version that wrote it.

    Raises `FieldOutOfRange` if it cannot be kept, `sqlite3.Error` if it cannot be changed, and what `fence` raises.
    """
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found == FORMAT:
        return
    kept = path.with_name(f"{path.name}.format{found}")
    try:
        _keep(path, kept)
    except (OSError, FieldOutOfRange) as error:
        raise FieldOutOfRange(
            f"the journal {path} is of format {found}, and stays so: the server copies it before it converts it to "
            f"format {FORMAT}. But {error}; make room for the copy",
            param="state_dir",
        ) from error
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        fence(connection)
        for statement in chain.from_iterable(STEPS[found - OLDEST :]):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {FORMAT}")
    logger.info("the journal is of format %d now; as it was, of format %d, it is kept in %s", FORMAT, found, kept)


def _keep(path: Path, kept: Path) -> None:
    """A copy under its name is whole, and would survive a power cut."""
    unnamed = kept.with_name(f"{kept.name}.new")
    try:
        unnamed.unlink(missing_ok=True)
        copy_journal(path, unnamed)
        sync(unnamed)
        unnamed.replace(kept)
    except BaseException:
        with contextlib.suppress(OSError):
            unnamed.unlink(missing_ok=True)
        raise
    sync(kept.parent)


OWNED = ("session", "upload", "home", "keyed_request")
"""Tables with a column `owner`."""
OLD_NAME_DIGITS = 32
"""Until format 8 the name was so much of the key's SHA-256 digest in hexadecimal."""


def rename_tenants(connection: sqlite3.Connection, names: Mapping[str, str], fence: Fence) -> None:
    """Give what each key of `--api-keys` owns the name that the key has now: names follow the order of the flags, which
    may change between two starts. `names` has the SHA-256 digest of each, in hexadecimal.

    A key that is not given any more keeps what it owns, under a name that no key gets. It finds that when it is back.
    Raises `sqlite3.Error`, and what `fence` raises; then nothing has changed.
    """
    known = {name: (salt, digest) for name, salt, digest in connection.execute("SELECT * FROM api_key")}
    before: dict[str, str | None] = dict.fromkeys(names)
    """The name that each key had last; None: it is new here, or from before there were such names."""
    for name, sha256 in names.items():
        before[name] = next((old for old, (salt, digest) in known.items() if _salted(sha256, salt) == digest), None)
    if all(name == before[name] for name in names):
        return
    renames = {old or names[name][:OLD_NAME_DIGITS]: name for name, old in before.items()}
    for name in known.keys() & names.keys() - renames.keys():
        renames[name] = f"former-{secrets.token_hex(8)}"
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        fence(connection)
        # KV on disk is found by its namespace: sessions of the old names keep theirs.
        for old, name in renames.items():
            if before.get(name, "") is None:
                connection.execute("UPDATE session SET namespace = owner WHERE owner = ? AND namespace IS NULL", (old,))
        for table in OWNED:  # in two steps: names may change places
            for step, old in enumerate(renames):
                connection.execute(f"UPDATE OR REPLACE {table} SET owner = ? WHERE owner = ?", (f"\n{step}", old))
            for step, name in enumerate(renames.values()):
                connection.execute(f"UPDATE OR REPLACE {table} SET owner = ? WHERE owner = ?", (name, f"\n{step}"))
        for name in renames.keys() | names.keys():
            connection.execute("DELETE FROM api_key WHERE name = ?", (name,))
        for old, name in renames.items():
            if old in known:
                connection.execute("INSERT INTO api_key VALUES (?, ?, ?)", (name, *known[old]))
        for name in names:
            if before[name] is None:
                salt = secrets.token_bytes(hashlib.blake2b.SALT_SIZE)
                connection.execute("INSERT INTO api_key VALUES (?, ?, ?)", (name, salt, _salted(names[name], salt)))


def _salted(sha256: str, salt: bytes) -> bytes:
    return hashlib.blake2b(bytes.fromhex(sha256), salt=salt, digest_size=32).digest()
