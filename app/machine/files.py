"""Folders that can be written to, room on their disks, and the kernel's own files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
from pathlib import Path

import psutil


def make_writable(folder: Path, mode: int = 0o777) -> None:
    """Make the folder if need be, and a file in it that is gone at once. Raises `OSError` if either fails."""
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def make_private_folder(folder: Path) -> None:
    """Make the folder, and the one that it is in, if need be: for their owner alone. Raises `OSError`."""
    for each in (folder.parent, folder):  # parents that `mkdir` makes by itself are open to all
        each.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_private(path: Path) -> None:
    """Make the file if need be, and leave it to its owner alone. Raises `OSError` if it cannot be made."""
    path.touch(0o600)
    with contextlib.suppress(OSError):  # a mounted folder may know no modes, or other owners
        path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700)


def sync(path: Path) -> None:
    """Return when a power cut would leave what is in the file, or the names in the folder. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain(error: OSError) -> str:
    """The system's reason. Where rights are missing, also who owns the path, or what can be seen of its parents, and
    who asks: ids of users.
    """
    reason = error.strerror or str(error)
    if not isinstance(error, PermissionError) or error.filename is None:
        return reason
    path = Path(str(error.filename))
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f"{reason}; {each} belongs to user {each.stat().st_uid}, this process runs as user {os.geteuid()}"
    return reason


def read(path: Path) -> str | None:
    """The file's text without the space around it; None if it cannot be had."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def read_field(path: Path, name: str) -> str | None:
    """The value of `name` in a file of "name: value" or "name value" lines; None if there is none."""
    found = re.search(rf"^{re.escape(name)}\s*:?\s+(.+)$", read(path) or "", re.MULTILINE)
    return found[1] if found else None


def parse_list(text: str) -> frozenset[int]:
    """The kernel's lists of CPUs and nodes: "0-2,8" is 0, 1, 2 and 8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


MIB = 1 << 20
GIB = 1 << 30


def size(num_bytes: float) -> str:
    """In MiB below one GiB: "8.0 MiB", "79.1 GiB", and "-2.0 GiB" of what is missing."""
    unit, name = (GIB, "GiB") if abs(num_bytes) >= GIB else (MIB, "MiB")
    return f"{num_bytes / unit:.1f} {name}"


def counted(count: int, noun: str) -> str:
    """ "1 session", "2 sessions"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def rate(bytes_per_second: float) -> str:
    """In powers of ten, as buses are sold: "55.2 GB/s"."""
    return f"{bytes_per_second / 1e9:.1f} GB/s"


OVER_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "ocfs2", "gfs2"}
    | {"9p", "virtiofs"}
)
"""Types other than those of FUSE."""


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write where `folder` is, or will be. Raises `OSError`."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    found = os.statvfs(existing)
    return found.f_bavail * found.f_frsize


def disk_bytes(folder: Path) -> int:
    """How large the disk is where `folder` is, which exists. Raises `OSError`."""
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize


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
