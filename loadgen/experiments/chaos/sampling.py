"""What the server uses over time."""

import asyncio
import os
import re
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from loadgen.experiments.chaos.hosting import WATCHER, HostedServer, bearer
from loadgen.experiments.chaos.notes import Notes
from loadgen.report.tables import Row
from loadgen.report.text import MIB
from loadgen.sampling.processes import process_use

PERIOD_S = 1.0
READ_TIMEOUT_S = 2.0
SESSIONS = re.compile(r"^djinn_sessions (\d+)", re.MULTILINE)


async def keep_sampling(server: HostedServer, notes: Notes) -> None:
    """A sample every second, until cancelled. None is taken while there is no server."""
    async with httpx.AsyncClient(timeout=READ_TIMEOUT_S, headers=bearer(WATCHER)) as http:
        while True:
            sessions = await _sessions(http, server)
            assert server.state is not None
            sample = await asyncio.to_thread(take, server.pid, server.state, notes.seconds, sessions)
            if sample is not None:
                notes.findings.samples.append(sample)
            await asyncio.sleep(PERIOD_S)


def take(pid: int, state: Path, at_s: float, sessions: int | None) -> Row | None:
    """What process `pid` and all below it use now; None if it is gone."""
    use = process_use(pid)
    if use is None or not use.rss_bytes:
        return None
    return {
        "second": at_s,
        "resident memory, MiB": use.rss_bytes / MIB,
        "open descriptors": descriptors(pid),
        "state folder, MiB": folder_bytes(state) / MIB,
        "open sessions": sessions,
    }


def descriptors(pid: int) -> int:
    """Open descriptors of a process and all below it."""
    found = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                found += process.num_fds()
    return found


def folder_bytes(folder: Path) -> int:
    """Sizes of all files below a folder; files and folders that vanish meanwhile do not count."""
    found = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                found += os.path.getsize(os.path.join(inner, name))
    return found


async def _sessions(http: httpx.AsyncClient, server: HostedServer) -> int | None:
    with suppress(httpx.HTTPError):
        told = [(await http.get(f"{url}/metrics")).text for url in server.urls.values()]
        found = [int(count) for text in told for count in SESSIONS.findall(text)]
        return sum(found) if found else None
    return None
