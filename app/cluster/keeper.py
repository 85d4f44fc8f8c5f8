"""The replicas' processes: started, followed by others when they end, drained at the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import re
import shutil
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.domain.errors import DjinnError
from app.machine.files import explain

logger = logging.getLogger(__name__)

READY = re.compile(r"Djinn serves .+ on (http://\S+)")
ENDS_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()
"""What a command begins with so that the kernel ends it when its keeper dies; Linux alone can."""
PRIVATE = "DJINN_"
GPUS = "CUDA_VISIBLE_DEVICES"
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Before a replica is started again that has ended at its start: twice as long each time."""
STEADY_S = 10.0
"""A replica that has served for as long is started again at once."""
GO = b"go\n"
"""What a process that stands by waits for."""
USAGE_ERROR = 2
"""Exit status: the settings are wrong."""
FULL = (errno.EAGAIN, errno.ENOMEM)
"""The machine has no room for a process at the moment."""
LONGEST_LINE = 1 << 24
"""Bytes that a replica may print without an end of line: a longer one would end its keeper."""


class NeverStarted(DjinnError):
    """A replica cannot start with these settings."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """How to start one replica. `settings` are values of `DJINN_*` variables by the settings' names."""

    name: str
    host: str
    """The address that it listens on itself, which the other replicas must reach."""
    port: int
    state_dir: Path
    settings: Mapping[str, str]
    has_standby: bool = False
    """Whether another process is kept that has all but begun."""
    gpus: str | None = None
    """The GPUs that it sees, as `CUDA_VISIBLE_DEVICES` names them; None: those that its keeper sees."""
    shared: int | None = None
    """The descriptor of a socket whose connections all replicas take."""

    def command(self) -> list[str]:
        """The program and its flags."""
        # -P: the working folder may have its own `app`.
        program = [*ENDS_WITH_PARENT, sys.executable, "-P", "-m", "app", "serve"]
        flags = {
            "--replica": self.name,
            "--host": self.host,
            "--port": str(self.port),
            "--state-dir": str(self.state_dir),
        }
        if self.shared is not None:
            flags["--shared-socket"] = str(self.shared)
        return [*program, *(word for flag in flags.items() for word in flag)]

    def environment(self) -> dict[str, str]:
        """Settings are variables, not flags: all users of a machine can read flags, and keys are settings."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
        if self.gpus is not None:
            others[GPUS] = self.gpus
        return others | {f"{PRIVATE}{name.upper()}": value for name, value in self.settings.items()}


class Keeper:
    """Keeps one replica running. Used on the event loop only."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.url: str | None = None
        """Where it listens; None while it does not."""
        self.failure: str | None = None
        """Why it can never start, if it has never started."""
        self._process: Process | None = None
        self._standby: Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._is_ending = False

    def start(self) -> None:
        """Begin to keep it running. Call on the running event loop."""
        self._keeping = asyncio.create_task(self._keep())

    def reload(self) -> None:
        """Have it read its files again: one that starts does so anyway."""
        if self.url is not None:
            _signal(self._process, signal.SIGHUP)

    async def stop(self) -> None:
        """Drain it: returns when its processes have ended, in an orderly way or not. It is not started again, and
        neither are the others: its sessions stay.
        """
        self._is_ending = True
        if _runs(self._process):
            # One that still starts may have been told to ignore the one, and ends at the other at once.
            _signal(self._process, signal.SIGTERM if self.url is None else signal.SIGINT)
        elif self._keeping is not None:
            self._keeping.cancel()  # it waits for the next start
        if self._watching is not None:
            self._watching.cancel()
        if self._keeping is not None:
            await asyncio.wait([self._keeping])
        if self._standby is not None:
            _signal(self._standby, signal.SIGKILL)
            await self._standby.wait()

    def kill(self) -> None:
        """End it at once."""
        self._is_ending = True
        for process in (self._process, self._standby):
            _signal(process, signal.SIGKILL)

    async def _keep(self) -> None:
        wait_s, has_run = 0.0, False
        while True:
            try:
                self._process = await self._begin()
            except OSError as error:
                if error.errno not in FULL and not has_run:
                    self.failure = f"replica {self.spec.name} cannot be started: {explain(error)}"
                    return
                ended, served_s = f"has no process: {explain(error)}", 0.0
            else:
                served_s = await self._listen(self._process)
                status = await self._process.wait()
                has_run = has_run or served_s > 0
                if status == USAGE_ERROR and not has_run and not self._is_ending:
                    self.failure = f"replica {self.spec.name} cannot start: it has said why"
                    return
                ended = f"ended with status {status}"
            if self._is_ending:
                return
            wait_s = 0.0 if served_s > STEADY_S else min(max(FIRST_WAIT_S, 2 * wait_s), LONGEST_WAIT_S)
            logger.error("replica %s %s; started again in %g s", self.spec.name, ended, wait_s)
            await asyncio.sleep(wait_s)

    async def _begin(self) -> Process:
        """The process that stands by, if there is one, or else a new one."""
        process, self._standby = self._standby, None
        if not _runs(process):
            return await self._spawn()
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(GO)
        return process

    async def _listen(self, process: Process) -> float:
        """Follow a process to the end of what it says. Returns for how many seconds it has served."""
        assert process.stdout is not None
        served_from = math.inf
        async for line in process.stdout:
            if (ready := READY.match(line.decode(errors="replace"))) is not None:
                self.url, served_from = ready[1], time.monotonic()
                await self._stand_by()
        self.url = None
        return max(0.0, time.monotonic() - served_from)

    async def _stand_by(self) -> None:
        """Start a process that stands by, if there is to be one. Without, a new one follows where a replica ends."""
        if not self.spec.has_standby or self._is_ending:
            return
        try:
            self._standby = await self._spawn("--standby")
        except OSError as error:
            logger.warning("no standby for replica %s: %s", self.spec.name, explain(error))
            return
        self._watching = asyncio.create_task(self._watch(self._standby))

    async def _watch(self, standby: Process) -> None:
        """Start another if a process ends while it stands by: it serves no requests meanwhile."""
        status = await standby.wait()
        if standby is not self._standby or self._is_ending:
            return
        text = "the standby of replica %s ended with status %d; another in %g s, or when the replica is started again"
        logger.error(text, self.spec.name, status, LONGEST_WAIT_S)
        await asyncio.sleep(LONGEST_WAIT_S)
        if standby is self._standby:
            await self._stand_by()

    async def _spawn(self, *flags: str) -> Process:
        return await asyncio.create_subprocess_exec(
            *self.spec.command(),
            *flags,
            stdin=asyncio.subprocess.PIPE if flags else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=self.spec.environment(),
            limit=LONGEST_LINE,
            pass_fds=() if self.spec.shared is None else (self.spec.shared,),
            process_group=0,  # a terminal's Ctrl-C is for who keeps it: a second one would end it at once
        )


class Replicas:
    """The replicas of one cluster on this machine. Used on one event loop."""

    def __init__(self, specs: Sequence[ReplicaSpec]) -> None:
        self._keepers = [Keeper(spec) for spec in specs]

    def start(self) -> None:
        """Begin to start all of them."""
        for keeper in self._keepers:
            keeper.start()

    def urls(self) -> dict[str, str]:
        """Those that listen now, by name. Raises `NeverStarted` if one can never."""
        for keeper in self._keepers:
            if keeper.failure is not None:
                raise NeverStarted(keeper.failure)
        return {keeper.spec.name: keeper.url for keeper in self._keepers if keeper.url is not None}

    @property
    def all_listen(self) -> bool:
        """Whether none is missing."""
        return all(keeper.url is not None for keeper in self._keepers)

    def reload(self) -> None:
        """Have all read their files again."""
        for keeper in self._keepers:
            keeper.reload()

    async def stop(self) -> None:
        """Drain all of them; returns when they have ended."""
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers))

    def kill(self) -> None:
        """End all at once."""
        for keeper in self._keepers:
            keeper.kill()


def _runs(process: Process | None) -> bool:
    return process is not None and process.returncode is None


def _signal(process: Process | None, number: int) -> None:
    """Send a process a signal, if it still runs."""
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
