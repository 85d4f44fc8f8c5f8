"""The replicas' processes: it starts them, starts them again when they end, and drains them at the end."""

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
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.domain.errors import DjinnError
from app.machine.files import explain
from app.web.server import ECHO_S, Hangups, url_of

logger = logging.getLogger(__name__)

READY = re.compile(r"Djinn serves .+ on (http://\S+)")
ENDS_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()
"""Put before a command, it has the kernel end that when its keeper dies. Only Linux can."""
PRIVATE = "DJINN_"
GPUS = "CUDA_VISIBLE_DEVICES"
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""How long to wait before a replica that has ended at its start is started again: twice as long each time."""
STEADY_S = 10.0
"""A replica that has served for this long is started again at once."""
LOOK_S = 0.1
"""Between two looks at whether the replicas listen."""
GO = b"go\n"
"""What a standby waits to read."""
USAGE_ERROR = 2
"""Exit status: the settings are wrong."""
FULL = (errno.EAGAIN, errno.ENOMEM)
"""Errors of a machine that has no room for a process at the moment."""
LONGEST_LINE = 1 << 24
"""Most bytes of a line that a replica prints: a longer one would end its keeper."""


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
    """Whether a second process stands by."""
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

    def signal(self, number: int) -> None:
        """Send it a signal."""
        _signal(self._process, number)

    async def stop(self) -> None:
        """Drain it, and return when its processes have ended. As all replicas end, its sessions do not move."""
        self._is_ending = True
        if self._process is not None and self._process.returncode is None:
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
        """The standby if there is one, else a new process."""
        process, self._standby = self._standby, None
        if process is None or process.returncode is not None or process.stdin is None:
            return await self._spawn()
        process.stdin.write(GO)
        return process

    async def _listen(self, process: Process) -> float:
        """Read what a process prints, to the end. Returns for how many seconds it has served."""
        assert process.stdout is not None
        served_from = math.inf
        async for line in process.stdout:
            if (ready := READY.match(line.decode(errors="replace"))) is not None:
                self.url, served_from = ready[1], time.monotonic()
                await self._stand_by()
        self.url = None
        return max(0.0, time.monotonic() - served_from)

    async def _stand_by(self) -> None:
        """Start a standby, if there is to be one. If that fails, the next start takes longer."""
        if not self.spec.has_standby or self._is_ending:
            return
        try:
            self._standby = await self._spawn("--standby")
        except OSError as error:
            logger.warning("no standby for replica %s: %s", self.spec.name, explain(error))
            return
        self._watching = asyncio.create_task(self._watch(self._standby))

    async def _watch(self, standby: Process) -> None:
        """Start another standby if this one ends unused."""
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
        self._ending = asyncio.Event()
        self._told_at = 0.0

    async def run(self, bound: socket.socket, hangups: Hangups) -> None:
        """Keep them running until a signal says that they end: SIGTERM or SIGINT drains all, a second one ends them at
        once. SIGHUP has them read their files again. `bound` is the socket that they share. Raises `NeverStarted`.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)

        def reload() -> None:
            loop.call_soon_threadsafe(self._reload)

        hangups.hand_to(reload)
        self.start()
        try:
            while len(self.urls()) < len(self._keepers) and not self._ending.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), LOOK_S)
            if not self._ending.is_set():
                names = ", ".join(f"{name} {url}" for name, url in sorted(self.urls().items()))
                print(f"Djinn's cluster is {url_of(bound)}, by its replicas {names}", flush=True)
            await self._ending.wait()
            bound.close()  # only replicas take connections now, as long as they do
            await self.stop()
        except NeverStarted:
            await self.stop()
            raise
        finally:
            self._kill()

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

    async def stop(self) -> None:
        """Drain all of them; returns when they have ended."""
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers))

    def _kill(self) -> None:
        for keeper in self._keepers:
            keeper.kill()

    def _reload(self) -> None:
        for keeper in self._keepers:
            if keeper.url is not None:  # one that starts reads them anyway
                keeper.signal(signal.SIGHUP)

    def _end(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if not self._ending.is_set():
            self._told_at = now
            self._ending.set()
        elif number is not signal.SIGTERM or now - self._told_at >= ECHO_S:
            self._kill()


def _signal(process: Process | None, number: int) -> None:
    """Send a process a signal, if it still runs."""
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
