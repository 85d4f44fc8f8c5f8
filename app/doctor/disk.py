"""The folder of the disk tier and the journal."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from app.doctor.findings import Finding, error, ok, warning
from app.machine.disk import file_system, is_of_network
from app.machine.units import GIB, size

NAME = "disk"
IN_MEMORY = ("tmpfs", "ramfs")
LEAST_FREE = GIB
ELSEWHERE = "name another folder with --state-dir"


@dataclass(frozen=True, slots=True)
class Disk:
    """state_dir: as given. folder: the part of it that exists. Sizes in bytes, of the file system it is on."""

    state_dir: str
    folder: str
    writable: bool
    file_system: str
    free_bytes: int
    total_bytes: int


def read_disk(state_dir: Path) -> Disk:
    """Changes nothing: a folder that is not there yet is judged by where it will be."""
    path = state_dir.absolute()
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    usage = shutil.disk_usage(folder)
    return Disk(
        state_dir=str(state_dir),
        folder=str(folder),
        writable=folder.is_dir() and os.access(folder, os.W_OK | os.X_OK),
        file_system=file_system(folder),
        free_bytes=usage.free,
        total_bytes=usage.total,
    )


def check_disk(disk: Disk | None) -> Finding:
    """`disk`: None where there is no disk tier."""
    if disk is None:
        return ok(NAME, "no state directory: KV is never on disk, and sessions do not survive a restart")
    summary = f"{size(disk.free_bytes)} free of {size(disk.total_bytes)} for {disk.state_dir}"
    if not disk.writable:
        summary = f"{disk.state_dir}: Djinn cannot write to {disk.folder}"
        return error(NAME, summary, f"make it writable, or {ELSEWHERE}")
    if disk.file_system in IN_MEMORY:
        return warning(NAME, f"{summary}, which is memory ({disk.file_system}): gone after a restart", ELSEWHERE)
    if is_of_network(disk.file_system):
        return warning(
            NAME, f"{summary}, over the network ({disk.file_system}), where SQLite's WAL is not safe", ELSEWHERE
        )
    if disk.free_bytes < LEAST_FREE:
        return warning(NAME, f"{summary}: hardly any KV fits", f"make room, or {ELSEWHERE}")
    return ok(NAME, summary)
