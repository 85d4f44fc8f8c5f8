"""The memory of the host: what is free on the machine is not all free for a process in a container."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.machine.cgroup import MemoryLimit, read_memory_limit


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
