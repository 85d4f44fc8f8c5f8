"""How much of the benchmark's cores went to whom: a figure taken while others compute is no figure."""

import os
import time
from collections.abc import Callable
from pathlib import Path

DISTURBED_SHARE = 0.02
"""Where other processes had more of the cores than this, a measurement is reported as disturbed."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuMeter:
    """Counts, from its creation on, the share of `cores` that neither idled nor ran our own processes.

    own_cpu_s: CPU seconds so far of everything that belongs to the measurement, on those cores.
    """

    def __init__(self, cores: list[int], own_cpu_s: Callable[[], float]) -> None:
        self._cores = cores
        self._own_cpu_s = own_cpu_s
        self._start = time.perf_counter()
        self._busy = busy_cpu_s(cores)
        self._own = own_cpu_s()

    def other_share(self) -> float:
        """Between 0 (nobody else) and 1. Time that the hypervisor took away counts as somebody else's."""
        capacity = (time.perf_counter() - self._start) * len(self._cores)
        other = (busy_cpu_s(self._cores) - self._busy) - (self._own_cpu_s() - self._own)
        return min(max(other / capacity, 0.0), 1.0)


def busy_cpu_s(cores: list[int]) -> float:
    """CPU seconds since boot in which these cores did not idle. Fields of /proc/stat: see proc(5)."""
    wanted = {f"cpu{core}" for core in cores}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in wanted:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / TICKS_PER_S


def session_cpu_s(session: int) -> float:
    """CPU seconds so far of the living processes of one POSIX session."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = _fields(stat)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


def process_cpu_s(process: int) -> float:
    """CPU seconds so far of one living process, without its children."""
    fields = _fields(Path(f"/proc/{process}/stat"))
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _fields(stat: Path) -> list[str]:
    """Those behind the command's name, which is in brackets and may hold spaces."""
    return stat.read_text().rpartition(")")[2].split()
