"""How much memory a container may use: what is free on the machine is no use to a process that is killed before."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from app.machine.files import read, read_field


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest limit on this process, and what is left of it, in bytes."""

    limit_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class _Version:
    """Where one version of control groups keeps what: docs.kernel.org, admin-guide/cgroup-v2 and cgroup-v1/memory."""

    controller: str
    mount: str
    limit: str
    usage: str
    page_cache: str


_VERSIONS = (
    _Version("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    _Version("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def read_memory_limit(root: Path, machine_bytes: int) -> MemoryLimit | None:
    """None if the machine's own `machine_bytes` are the only limit."""
    groups = [line.split(":", 2) for line in (read(root / "proc/self/cgroup") or "").splitlines()]
    found = [
        _read_group(root / version.mount / folder, version)
        for version in _VERSIONS
        for _, controllers, path in groups
        if version.controller in controllers.split(",")
        for folder in _with_parents(path)
    ]
    limits = [limit for limit in found if limit is not None and limit.limit_bytes < machine_bytes]
    return min(limits, key=lambda limit: limit.free_bytes, default=None)


def _with_parents(path: str) -> list[PurePosixPath]:
    """A group is also held to the limits of those that it is in. Inside a container only the last may be visible."""
    folder = PurePosixPath(path.lstrip("/"))
    return [folder, *folder.parents]


def _read_group(folder: Path, version: _Version) -> MemoryLimit | None:
    limit, usage = read(folder / version.limit), read(folder / version.usage)
    if limit is None or usage is None or limit == "max":
        return None
    # Unused file pages are given up before anyone is killed.
    page_cache = int(read_field(folder / "memory.stat", version.page_cache) or 0)
    return MemoryLimit(int(limit), max(0, int(limit) - int(usage) + page_cache))
