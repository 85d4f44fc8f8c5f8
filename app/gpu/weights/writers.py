"""Whether somebody could be writing to a file."""

from __future__ import annotations

import errno
import fcntl
import signal
from contextlib import suppress


def has_writers(file: int) -> bool:
    """Whether a process has the file open for writing, or mapped so, of which `file` is a descriptor for reading.

    Who gets a read lease knows that nobody has (fcntl(2), "Leases"). It is given back at once: whoever opens the file
    in between waits that long, and we are sent a signal that is ignored. False where there are no leases: not on Linux,
    on some file systems, on files of others.
    """
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except (OSError, AttributeError) as error:
        return isinstance(error, OSError) and error.errno == errno.EAGAIN
    with suppress(OSError):  # another thread has given back the lease of us both
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
