"""Which parts of a file the page cache holds, and whether another process could be writing to it."""

import ctypes
import errno
import fcntl
import mmap
import signal
from contextlib import suppress

import numpy as np

_SAMPLES = 3
"""Places of a run of bytes that are looked at: what is read at once is dropped in large parts too."""
_mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
if _mincore is not None:
    _mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Residency:
    """Looks at a file by mapping it, and never touches the mapping: nothing is read by asking, nor can a file that
    somebody truncates end the process.

    The other way to ask is a read that is not to wait. The system takes that as a wish, begins to read there, and the
    reads from first to last beside it, which it reads ahead for, come in between.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        """`file` is the descriptor of a file of `nbytes` bytes, at least 1; it may be closed afterwards. Raises
        OSError.
        """
        self._map = mmap.mmap(file, nbytes, access=mmap.ACCESS_READ)
        self._start = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self._seen = (ctypes.c_ubyte * 1)()
        self._seen_at = ctypes.addressof(self._seen)

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether bytes `[offset, offset + nbytes)`, at least 1, are in memory, as far as samples tell. False where a
        system has no such call; Linux says so of all files that belong to others.
        """
        last = nbytes - 1
        return all(self._holds(offset + last * number // (_SAMPLES - 1)) for number in range(_SAMPLES))

    def close(self) -> None:
        """Nothing is asked any more."""
        self._map.close()

    def _holds(self, offset: int) -> bool:
        if _mincore is None:
            return False
        page = self._start + offset // mmap.PAGESIZE * mmap.PAGESIZE
        return _mincore(page, 1, self._seen_at) == 0 and self._seen[0] & 1 == 1


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
