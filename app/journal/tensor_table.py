"""The journal's table of tensors: each is there once, for as long as a row of another table refers to it."""

import hashlib
import sqlite3

TABLE = "CREATE TABLE tensor (digest BLOB PRIMARY KEY, data BLOB NOT NULL) STRICT;"


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


class TensorPutter:
    """Puts tensors into the table in one transaction. A row that refers to each must follow in the same one."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._digests: dict[int, tuple[bytes, bytes]] = {}
        """By the identity of the bytes, which are kept so that no others get it: many edits share a vector."""

    def put(self, data: bytes) -> bytes:
        """Put `data` there, unless it is there already; returns its digest."""
        known = self._digests.get(id(data))
        if known is not None:
            return known[0]
        digest = hashlib.blake2b(data, digest_size=32).digest()  # long enough that no tenant finds another's
        if self._connection.execute("SELECT 1 FROM tensor WHERE digest = ?", (digest,)).fetchone() is None:
            self._connection.execute("INSERT INTO tensor VALUES (?, ?)", (digest, data))
        self._digests[id(data)] = digest, data
        return digest


def load_tensors(connection: sqlite3.Connection) -> dict[bytes, bytes]:
    """Every tensor's data by its digest."""
    return dict(connection.execute("SELECT digest, data FROM tensor"))
