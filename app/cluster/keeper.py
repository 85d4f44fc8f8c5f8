"""One replica's process: started, started again when it ends, drained at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

READY = re.compile(r"Djinn serves .+ on (http://\S+)")
ENDS_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()
"""What a command begins with so that the kernel ends it when its keeper dies; Linux alone can."""
PRIVATE = "DJINN_"
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Before a replica that has ended is started again: twice as long each time."""
STEADY_S = 60.0
"""A replica that has run for as long is started again after the first wait."""
USAGE_ERROR = 2
LONGEST_LINE = 1 << 24
"""Bytes that a replica may print without an end of line: a longer one would end its keeper."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """How to start one replica. `settings` are values of `DJINN_*` variables by the settings' names."""

    name: str
    host: str
    """The address that it listens on, which the front door must reach."""
    port: int
    state_dir: Path | None
    settings: Mapping[str, str]

    def command(self) -> list[str]:
        """The program and its flags."""
        # -P: a folder that somebody works in may have an `app` of its own.
        program = [*ENDS_WITH_PARENT, sys.executable, "-P", "-m", "app", "serve"]
        folder = "none" if self.state_dir is None else str(self.state_dir)
        flags = {"--replica": self.name, "--host": self.host, "--port": str(self.port), "--state-dir": folder}
        return [*program, *(word for flag in flags.items() for word in flag)]

    def environment(self) -> dict[str, str]:
        """Settings are variables, not flags: everybody on a machine can read flags, and keys are settings."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
        return others | {f"{PRIVATE}{name.upper()}": value for name, value in self.settings.items()}


class Keeper:
    """Keeps one replica running. Used on the event loop only."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.url: str | None = None
        """Where it listens; None while it does not."""
        self.failure: str | None = None
        """Why it can never start, if it has never started."""
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._is_ending = False

    def start(self) -> None:
        """Begin to keep it running. Call on the running event loop."""
        self._keeping = asyncio.create_task(self._keep())

    def reload(self) -> None:
        """Have it read its files again: one that starts does so anyway."""
        if self._process is not None and self.url is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGHUP)

    async def stop(self) -> None:
        """Drain it: returns when its process has ended, in an orderly way or not. It is not started again, and neither
        are the others: its sessions stay.
        """
        self._is_ending = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # One that still starts may have been told to ignore the one, and ends at the other at once.
                self._process.send_signal(signal.SIGTERM if self.url is None else signal.SIGINT)
        elif self._keeping is not None:
            self._keeping.cancel()  # it waits for the next start
        if self._keeping is not None:
            await asyncio.wait([self._keeping])

    def kill(self) -> None:
        """End it at once."""
        self._is_ending = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _keep(self) -> None:
        wait_s, has_run = FIRST_WAIT_S, False
        while True:
            began = time.monotonic()
            status = await self._run_once()
            has_run = has_run or self.url is not None
            self.url = None
            if self._is_ending:
                return
            if status == USAGE_ERROR and not has_run:
                self.failure = f"replica {self.spec.name} cannot start: it has said why"
                return
            wait_s = FIRST_WAIT_S if time.monotonic() - began > STEADY_S else wait_s
            logger.error("replica %s ended with status %d; started again in %g s", self.spec.name, status, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _run_once(self) -> int:
        """Run it from its start to its end. Returns its exit status."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self.spec.command(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=self.spec.environment(),
            limit=LONGEST_LINE,
        )
        assert process.stdout is not None
        async for line in process.stdout:
            if (ready := READY.match(line.decode(errors="replace"))) is not None:
                self.url = ready[1]
        return await process.wait()
