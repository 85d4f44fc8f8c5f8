"""Which key of `--api-keys` had which name. The names follow the order of the flags, which may change between two
starts: what a key owns goes on under the name that the key has now.
"""

import hashlib
import secrets
import sqlite3
from collections.abc import Mapping

from app.journal.tables import Fence

TABLE = """
CREATE TABLE api_key (name TEXT PRIMARY KEY, salt BLOB NOT NULL, digest BLOB NOT NULL) STRICT, WITHOUT ROWID;
"""
"""`digest` is that of the key's SHA-256 digest with the salt."""
OWNED = ("session", "upload", "home", "keyed_request")
"""Tables with a column `owner`."""
OLD_NAME_DIGITS = 32
"""Until format 8 the name was so much of the key's SHA-256 digest in hexadecimal."""


def rename_tenants(connection: sqlite3.Connection, names: Mapping[str, str], fence: Fence) -> None:
    """Give what each key owns the name that the key has now. `names` has the SHA-256 digest of each, in hexadecimal.

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
