"""Files of exports, for tests that do not ask for room."""

from pathlib import Path

from app.exports.spool import Spool, SpoolFile
from app.machine.disk import Claim, DiskRoom


def spooled(path: Path) -> SpoolFile:
    """The file `path`, as if a spool had room for it."""
    room = DiskRoom(path.parent)
    return SpoolFile(path, None, Spool(None, room, 1 << 30), Claim(room))
