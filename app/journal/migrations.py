"""Journals that an earlier version wrote become ones of this: one step for each format that came after the oldest."""

import sqlite3

OLDEST = 4
"""The oldest format that this version reads."""
STEPS: tuple[tuple[str, ...], ...] = (
    (
        "ALTER TABLE session ADD COLUMN forked_from TEXT",
        "ALTER TABLE session ADD COLUMN forked_tokens INTEGER",
        "UPDATE session SET usage = json_set(usage, '$.last', NULL)",
    ),
    ("ALTER TABLE session ADD COLUMN namespace TEXT",),
)
"""The first makes format `OLDEST` one newer, and so on. A step never changes once it has been released."""
FORMAT = OLDEST + len(STEPS)
"""What this version writes."""


def migrate(connection: sqlite3.Connection, found: int) -> None:
    """Make a journal of format `found`, `OLDEST` at least, one of `FORMAT`: whole, or not at all."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        for step in STEPS[found - OLDEST :]:
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {FORMAT}")
