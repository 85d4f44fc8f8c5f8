"""Room on a disk: files that can be done without leave a reserve free for those that cannot."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from app.machine.units import size

OVER_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "ocfs2", "gfs2"}
    | {"9p", "virtiofs"}
)
"""Types beside those of FUSE."""


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write where `folder` is, or will be. Raises `OSError`."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    found = os.statvfs(existing)
    return found.f_bavail * found.f_frsize


def file_system(folder: Path) -> str:
    """The type of the one where `folder` is, which exists: that of the innermost mount point around it. Empty where the
    system does not tell.
    """
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    place = folder.resolve()
    return next((mounts[parent] for parent in (place, *place.parents) if parent in mounts), "")


def is_of_network(kind: str) -> bool:
    """Whether several machines can have a file system of that type mounted at once."""
    return kind in OVER_NETWORK or kind.startswith("fuse.")


def is_over_network(folder: Path) -> bool:
    """Whether other machines may have the folder's file system mounted too."""
    return is_of_network(file_system(folder))


def is_full(error: OSError) -> bool:
    """Whether a file could not grow because the disk, a quota or a limit on files has no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(OSError):
    """A file would take room that is not there, or that is reserved. `strerror` says how much is missing."""


class Claim:
    """Bytes that a file under way has yet to write. `grow` and `wrote` follow it."""

    def __init__(self, room: DiskRoom) -> None:
        self._room = room
        self.left = 0

    def grow(self, count: int) -> None:
        """Claim `count` bytes more. Raises `DiskFull`."""
        self._room.take(count)
        self.left += count

    def wrote(self, count: int) -> None:
        """So many of the bytes have been written: the disk itself counts them from now on."""
        count = min(count, self.left)
        self._room.give(count)
        self.left -= count


class DiskRoom:
    """What is free on the disk of `folder` beside `reserve` bytes. Any thread may use it."""

    def __init__(self, folder: Path, reserve: int = 0) -> None:
        self._folder = folder
        self.reserve = reserve
        self._claimed = 0
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Bytes that are free beside the reserve. Raises `OSError`."""
        return max(0, free_bytes(self._folder) - self.reserve)

    @property
    def missing(self) -> int:
        """Bytes of the reserve that are not free. Raises `OSError`."""
        return max(0, self.reserve - free_bytes(self._folder))

    @contextmanager
    def claiming(self, count: int = 0) -> Iterator[Claim]:
        """Claim `count` bytes for a file that is written meanwhile. Raises `DiskFull`."""
        claim = Claim(self)
        claim.grow(count)
        try:
            yield claim
        finally:
            claim.wrote(claim.left)

    def take(self, count: int) -> None:
        """Claim bytes. Raises `DiskFull`."""
        with self._lock:
            room = free_bytes(self._folder) - self.reserve - self._claimed
            if count > max(0, room):
                reserved = f" beside {size(self.reserve)} that are kept for the journal" if self.reserve else ""
                raise DiskFull(
                    errno.ENOSPC, f"{size(count)} are needed on disk, {size(max(0, room))} are free{reserved}"
                )
            self._claimed += count

    def give(self, count: int) -> None:
        """Let go of bytes that were claimed."""
        with self._lock:
            self._claimed -= count

    def beside(self, folder: Path) -> DiskRoom:
        """The room for files in `folder`: this one if they share the disk, else another one without a reserve."""
        return self if _device(folder) == _device(self._folder) else DiskRoom(folder)


def _device(folder: Path) -> int:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return existing.stat().st_dev
