"""Which machine this is since its last start, and how long ago that was."""

import time
from pathlib import Path

from app.machine.files import read

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
