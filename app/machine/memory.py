"""How much memory this process may use: of the machine, and of its container."""

import ctypes
import resource
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from app.machine.files import read, read_field


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest limit on this process, and what is left of it, in bytes."""

    limit_bytes: int
    free_bytes: int


_VERSIONS = {
    ("", "sys/fs/cgroup"): ("memory.max", "memory.current", "inactive_file"),
    ("memory", "sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Where each version of control groups keeps what: docs.kernel.org, admin-guide/cgroup-v2 and cgroup-v1/memory. Of a
controller and its mount: the files of the limit and the usage, and the field of the page cache.
"""


def read_memory_limit(root: Path, machine_bytes: int) -> MemoryLimit | None:
    """None if the machine's own `machine_bytes` are the only limit."""
    groups = [line.split(":", 2) for line in (read(root / "proc/self/cgroup") or "").splitlines()]
    found = [
        _read_group(root / mount / folder, *names)
        for (controller, mount), names in _VERSIONS.items()
        for _, controllers, path in groups
        if controller in controllers.split(",")
        # A group is also held to the limits of those that it is in. Inside a container only the last may be visible.
        for folder in (PurePosixPath(path.lstrip("/")), *PurePosixPath(path.lstrip("/")).parents)
    ]
    limits = [limit for limit in found if limit is not None and limit.limit_bytes < machine_bytes]
    return min(limits, key=lambda limit: limit.free_bytes, default=None)


def _read_group(folder: Path, limit_file: str, usage_file: str, cache_field: str) -> MemoryLimit | None:
    limit, usage = read(folder / limit_file), read(folder / usage_file)
    if limit is None or usage is None or limit == "max":
        return None
    # Unused file pages are given up before anyone is killed.
    page_cache = int(read_field(folder / "memory.stat", cache_field) or 0)
    return MemoryLimit(int(limit), max(0, int(limit) - int(usage) + page_cache))


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of the machine, and the container's limit if it has one."""

    total_bytes: int
    available_bytes: int
    limit: MemoryLimit | None

    @property
    def free_bytes(self) -> int:
        """What this process can have."""
        return self.available_bytes if self.limit is None else min(self.available_bytes, self.limit.free_bytes)


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """As of now; `root` is where `proc` and `sys` are."""
    memory = psutil.virtual_memory()
    return HostMemory(memory.total, memory.available, read_memory_limit(root, memory.total))


def give_back_freed() -> None:
    """Have the C library give memory that is freed back to the system, where it can (glibc's `malloc_trim`). Takes
    milliseconds: for the end of work that needed much more memory than what is left of it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


BOOT_ID, MACHINE_ID = Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id")
CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""One that goes on while the machine is suspended, where the system has it."""


def machine_id() -> str:
    """The same for all processes on one kernel until that ends; empty where the system does not tell."""
    boot = read(BOOT_ID)
    return "" if not boot else f"{boot} {read(MACHINE_ID) or ''}".strip()


def boot_time() -> float:
    """Seconds of a clock that no program sets."""
    return time.clock_gettime(CLOCK)


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, as far as the system lets it; returns the soft limit.

    Shells start programs with a soft limit of 1,024, for the sake of old ones that cannot count further.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS calls its limit infinite, and then refuses that
        return soft
    return hard
