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


def address_of(mapped: mmap.mmap) -> int:
    """Where the file is mapped."""
    return int(np.frombuffer(mapped, np.uint8).ctypes.data)


def is_in_memory(mapped_at: int, offset: int, nbytes: int) -> bool:
    """Whether bytes `[offset, offset + nbytes)`, at least 1, of the file that is mapped at the address are in memory,
    as far as samples tell. False where it is not mapped any more, or a system has no such call; Linux says so of all
    files that belong to others.

    The mapping is never touched: nothing is read by asking, nor can a file that another program truncates end the
    process. The other way to ask is a read that is not to wait. The system takes that as a wish and begins to read
    there, in between the reads from first to last that it reads ahead for.
    """
    if _mincore is None:
        return False
    seen, last = ctypes.c_ubyte(), nbytes - 1
    for number in range(_SAMPLES):
        page = (offset + last * number // (_SAMPLES - 1)) // mmap.PAGESIZE * mmap.PAGESIZE
        if _mincore(mapped_at + page, 1, ctypes.byref(seen)) != 0 or not seen.value & 1:
            return False
    return True


def has_writers(file: int) -> bool:
    """Whether a process has the file open for writing, or mapped so, of which `file` is a descriptor for reading.

    A read lease is granted only if none has (fcntl(2), "Leases"). It is given back at once: a process that opens the
    file in between waits that long, and we are sent a signal that is ignored. False where there are no leases: not on
    Linux, on some file systems, on files of others.
    """
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except (OSError, AttributeError) as error:
        return isinstance(error, OSError) and error.errno == errno.EAGAIN
    with suppress(OSError):  # another thread has given back the lease of us both
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
