"""`djinn cluster serve`: replicas on this machine that share one port, started again when they end.

No process stands between them and their clients: this one binds the socket of `--port`, and each replica inherits it.
While a replica is dead or stopped, the others accept the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import secrets
import signal
import socket
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase as letters

from app.domain.errors import DjinnError, FieldOutOfRange
from app.domain.text import LOOPBACK_NAMES
from app.flags import READY, USAGE_ERROR, child_command
from app.logs import Log, configure
from app.machine.files import explain, make_private, make_private_folder
from app.settings import Settings, variables
from app.web.server import ECHO_S, Hangups, bind, url_of

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
NOT_SHARED = frozenset({"host", "port", "replica", "state_dir"})
"""Settings that differ between replicas."""
OF_CLUSTER = ("replica", "cluster", "advertise", "cluster_key_file")
"""Settings that the cluster chooses for its replicas."""
FOLDER, KEY = "cluster", "cluster.key"
"""Below `--state-dir`: the store of the cluster, its key, and a folder for each replica."""
PRIVATE, GPUS = "DJINN_", "CUDA_VISIBLE_DEVICES"
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""How long to wait before a replica that has ended at its start is started again: twice as long each time."""
STEADY_S = 10.0
"""A replica that has served for this long is started again at once."""
LOOK_S = 0.1
"""Between two looks at whether the replicas listen."""
GO = b"go\n"
"""What a standby waits to read."""
FULL = (errno.EAGAIN, errno.ENOMEM)
"""Errors of a machine that has no room for a process at the moment."""
LONGEST_LINE = 1 << 24
"""Most bytes of a line that a replica prints: a longer one would end its keeper."""


class NeverStarted(DjinnError):
    """A replica cannot start with these settings."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many replicas to start. Of these, `prefill` only compute long prompts for the others. With `standby`, a
    second process waits to replace each. Each has `gpus` GPUs of this machine for itself; with 0, all share them.
    """

    replicas: int
    prefill: int
    standby: bool
    gpus: int


def serve(settings: Settings, given: Mapping[str, object], plan: Plan) -> int:
    """Start replicas, and keep them running until told to end. Returns the exit status. Raises `FieldOutOfRange`.

    `given` are the settings that flags have given. Those of the environment are the replicas' too.
    """
    settings.require_safe_access()
    configure(Log(logging.INFO, settings.log_format))
    if settings.state_dir is None:
        message = "state_dir: a cluster needs a folder, by which its replicas know each other and keep their sessions"
        raise FieldOutOfRange(message, param="state_dir")
    folder, shared = settings.state_dir.expanduser() / FOLDER, variables()
    for name, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        shared[name] = text.lower() if isinstance(value, bool) else text
    shared = {name: value for name, value in shared.items() if name not in NOT_SHARED}
    # Replicas listen on loopback, and must answer to the names that clients call the cluster by.
    shared["allowed_hosts"] = ",".join(dict.fromkeys((*settings.answered_hosts, *LOOPBACK_NAMES)))

    async def run(bound: socket.socket, hangups: Hangups) -> None:
        await Replicas(replica_specs(plan, folder, shared, bound.fileno())).run(bound, hangups)

    with Hangups.heard() as hangups, bind(settings.host, settings.port) as bound:
        asyncio.run(run(bound, hangups))
    return 0


def replica_specs(plan: Plan, folder: Path, shared: Mapping[str, str], descriptor: int) -> list[ReplicaSpec]:
    """The replicas a, b, ... z, a1, b1, ..., each with settings that all share, and with the socket of that
    `descriptor`. Those that only compute prompts come last. Raises `FieldOutOfRange`.
    """
    count = plan.replicas
    if not 0 <= plan.prefill < count:
        message = f"--prefill-replicas must be from 0 to {count - 1}, as sessions need a replica too"
        raise FieldOutOfRange(message, param="prefill_replicas")
    gpus, key = _gpus(plan), folder / KEY
    try:
        make_private_folder(folder)
        if not key.exists():
            fresh = key.with_suffix(".new")  # a crash must not leave half a key
            make_private(fresh)
            fresh.write_text(secrets.token_hex(32), encoding="utf-8")
            fresh.rename(key)
    except OSError as error:
        raise FieldOutOfRange(f"state_dir: {folder} cannot be written: {explain(error)}", param="state_dir") from error
    common = {**shared, "cluster": f"folder:{folder}", "cluster_key_file": str(key)}
    roles = ["decode" if plan.prefill else "both"] * (count - plan.prefill) + ["prefill"] * plan.prefill
    names = [letters[i % 26] + (str(i // 26) if i >= 26 else "") for i in range(count)]
    with contextlib.ExitStack() as held:  # a replica keeps its port when it is started again
        ports = [held.enter_context(socket.create_server((LOOPBACK, 0))).getsockname()[1] for _ in names]
    return [
        ReplicaSpec(name, port, folder / name, {**common, "role": role}, plan.standby, cards, descriptor)
        for name, port, role, cards in zip(names, ports, roles, gpus, strict=True)
    ]


def _gpus(plan: Plan) -> list[str | None]:
    """The GPUs of each replica, taken in order from those that this process sees. Raises `FieldOutOfRange`."""
    each, wanted, seen = plan.gpus, plan.gpus * plan.replicas, os.environ.get(GPUS)
    if each < 0:
        raise FieldOutOfRange(f"--replica-gpus must be 0 or more, not {each}", param="replica_gpus")
    if not each:
        return [None] * plan.replicas
    cards = sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    names = [str(card) for card in range(cards)] if seen is None else [name for name in seen.split(",") if name]
    if len(names) < wanted:
        message = f"{plan.replicas} replicas need {wanted} GPUs, and this process sees {len(names)}"
        raise FieldOutOfRange(message, param="replica_gpus")
    return [",".join(names[first : first + each]) for first in range(0, wanted, each)]


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """How to start one replica. Each also listens on its own loopback port.

    `settings` are the values of `DJINN_*` variables, by the names of the settings. `gpus` is for
    `CUDA_VISIBLE_DEVICES`; None leaves that as it is. All replicas accept connections on the socket with the descriptor
    `shared`.
    """

    name: str
    port: int
    state_dir: Path
    settings: Mapping[str, str]
    has_standby: bool = False
    gpus: str | None = None
    shared: int | None = None

    def command(self) -> list[str]:
        """The program and its flags."""
        flags = ["--replica", self.name, "--host", LOOPBACK, "--port", str(self.port)]
        flags += ["--state-dir", str(self.state_dir)]
        flags += [] if self.shared is None else ["--shared-socket", str(self.shared)]
        return child_command("serve", *flags)

    def environment(self) -> dict[str, str]:
        """Settings are variables, not flags: all users of a machine can read flags, and keys are settings."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
        others |= {} if self.gpus is None else {GPUS: self.gpus}
        return others | {f"{PRIVATE}{name.upper()}": value for name, value in self.settings.items()}


class Keeper:
    """Keeps one replica running. Used on the event loop only."""

    def __init__(self, spec: ReplicaSpec) -> None:
        """Begins at once."""
        self.spec = spec
        self.url: str | None = None
        """Where it listens; None while it does not."""
        self.failure: str | None = None
        """Why it can never start, if it has never started."""
        self._process: Process | None = None
        self._standby: Process | None = None
        self._is_ending = False
        self._keeping = asyncio.create_task(self._keep())
        self._watching: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Drain it, and return when its processes have ended. Its sessions do not move, because all replicas end."""
        self._is_ending = True
        if self._process is not None and self._process.returncode is None:
            # One that still starts may have been told to ignore the one, and ends at the other at once.
            self.signal(signal.SIGTERM if self.url is None else signal.SIGINT)
        else:
            self._keeping.cancel()  # it waits for the next start
        await asyncio.wait([self._keeping])
        if self._watching is not None:
            self._watching.cancel()
        if self._standby is not None:
            self.kill()
            await self._standby.wait()

    def kill(self) -> None:
        """End it at once."""
        self._is_ending = True
        for process in (self._process, self._standby):
            _signal(process, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        _signal(self._process, number)

    async def _keep(self) -> None:
        wait_s, has_run = 0.0, False
        while not self._is_ending:
            served_from, status = math.inf, None
            try:
                process, self._standby = self._standby, None
                if process is None or process.returncode is not None or process.stdin is None:
                    process = await self._spawn()
                else:
                    process.stdin.write(GO)
                self._process = process
                assert process.stdout is not None
                async for line in process.stdout:
                    if (ready := READY.match(line.decode(errors="replace"))) is not None:
                        self.url, served_from, has_run = ready[1], time.monotonic(), True
                        await self._stand_by()
                self.url = None
                status = await process.wait()
                ended = f"ended with status {status}"
            except OSError as error:
                ended = f"cannot be started: {explain(error)}"
                if error.errno not in FULL and not has_run:
                    self.failure = f"replica {self.spec.name} {ended}"
            if status == USAGE_ERROR and not has_run:
                self.failure = f"replica {self.spec.name} cannot start: it has said why"
            if self._is_ending or self.failure is not None:
                return
            is_steady = time.monotonic() - served_from > STEADY_S
            wait_s = 0.0 if is_steady else min(max(FIRST_WAIT_S, 2 * wait_s), LONGEST_WAIT_S)
            level = logging.INFO if status == 0 else logging.ERROR
            logger.log(level, "replica %s %s; started again in %g s", self.spec.name, ended, wait_s)
            await asyncio.sleep(wait_s)

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
            stdin=PIPE if flags else DEVNULL,
            stdout=PIPE,
            env=self.spec.environment(),
            limit=LONGEST_LINE,
            pass_fds=() if self.spec.shared is None else (self.spec.shared,),
            process_group=0,  # Ctrl-C in a terminal must reach the keeper alone: a second signal ends a replica at once
        )


class Replicas:
    """The replicas of one cluster on this machine. Used on one event loop."""

    def __init__(self, specs: Sequence[ReplicaSpec]) -> None:
        """Begins to start all of them."""
        self._keepers = [Keeper(spec) for spec in specs]

    async def run(self, bound: socket.socket, hangups: Hangups) -> None:
        """Keep them running until SIGTERM or SIGINT, which drains all. A second signal ends them at once. SIGHUP has
        them read their files again. `bound` is the socket that they share. Raises `NeverStarted`.
        """
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        echoes_until = math.inf

        def end(number: int) -> None:
            nonlocal echoes_until
            if not told.is_set():
                echoes_until = loop.time() + ECHO_S
                told.set()
            elif number != signal.SIGTERM or loop.time() >= echoes_until:
                self._kill()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end, number)

        def reload() -> None:
            loop.call_soon_threadsafe(self._reload)

        hangups.hand_to(reload)
        try:
            while len(urls := self.urls()) < len(self._keepers) and not told.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await told.wait()
            if not told.is_set():
                names = ", ".join(f"{name} {url}" for name, url in sorted(urls.items()))
                print(f"Djinn's cluster is {url_of(bound)}, by its replicas {names}", flush=True)
            await told.wait()
            bound.close()  # only replicas take connections now, as long as they do
        finally:
            try:
                await self.stop()
            finally:
                self._kill()

    def urls(self) -> dict[str, str]:
        """The URLs of listening replicas, by name. Raises `NeverStarted` if a replica cannot start."""
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
            if keeper.url is not None:  # a starting replica reads the files anyway
                keeper.signal(signal.SIGHUP)


def _signal(process: Process | None, number: int) -> None:
    """Send a process a signal, if it still runs."""
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
