"""What the server's processes use."""

from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """CPU seconds since they began, and bytes of resident memory, shared pages counted in each process."""

    cpu_s: float
    rss_bytes: int


def process_use(pid: int) -> ProcessUse | None:
    """What process `pid` and all below it use; None if it is gone.

    Children that have ended count through their parent, which has waited for them.
    """
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    cpu_s, rss_bytes = 0.0, 0
    for process in tree:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():
            times = process.cpu_times()
            cpu_s += times.user + times.system + times.children_user + times.children_system
            rss_bytes += process.memory_info().rss
    return ProcessUse(cpu_s, rss_bytes)
