"""News of a lease on a full disk: a file beside the journal that is overwritten where it is, which takes no room."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from app.machine.files import make_private, sync

NAME = "renewals"
WORD_BYTES = 16
SIZE = 2 * WORD_BYTES
"""Of the file: one word that never comes twice, in hexadecimal."""


class Renewals:
    """The file at `path`, beside the journal. Who renews or takes a lease holds the journal's write lock meanwhile. Who
    only watches needs no lock, as the take looks again. `make` needs none either: its word is news too, and only makes
    others wait longer.
    """

    def __init__(self, journal: Path) -> None:
        self.path = journal.with_name(NAME)

    def make(self) -> None:
        """Have the file, with its room on the disk. Raises `OSError`."""
        make_private(self.path)
        if self.path.stat().st_size != SIZE:
            self.path.write_text(secrets.token_hex(WORD_BYTES))
        sync(self.path)
        sync(self.path.parent)

    def read(self) -> str:
        """What is in the file; empty without a file. Raises `OSError`."""
        try:
            return self.path.read_bytes().hex()
        except FileNotFoundError:
            return ""

    def write(self) -> None:
        """Overwrite the file with another word, and flush it. Raises `OSError`, also if there is no such file."""
        descriptor = os.open(self.path, os.O_WRONLY)  # never a new one: that needs room, and others may look at it
        try:
            os.pwrite(descriptor, secrets.token_hex(WORD_BYTES).encode(), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
