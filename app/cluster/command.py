"""`djinn cluster serve`: replicas on this machine that take the connections of one port together.

No process stands between them and their clients: the socket of `--port` is bound here, and each replica inherits it.
One that is dead or stopped takes no connections, and the others do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import string
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from app.cluster.keeper import GPUS, NeverStarted, Replicas, ReplicaSpec
from app.domain.errors import FieldOutOfRange
from app.domain.text import LOOPBACK_NAMES
from app.logs import Log, configure
from app.machine.files import explain, make_private, make_private_folder
from app.settings import Settings, variables
from app.web.listener import bind
from app.web.server import ECHO_S, Hangups, url_of

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LOOK_S = 0.1
"""Between two looks at whether the replicas listen."""
NOT_SHARED = frozenset({"host", "port", "replica", "state_dir"})
"""Settings that each replica has of its own."""
OF_CLUSTER = ("replica", "cluster", "advertise", "cluster_key_file")
"""Settings that a cluster sets itself for its replicas."""
FOLDER, KEY = "cluster", "cluster.key"
"""Below `--state-dir`: the store of the cluster, its key, and a folder for each replica."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many replicas there are to be, of which `prefill` only compute long prompts for the others. With `standby`
    another process waits to take the place of each. Each has `gpus` of this machine's GPUs for itself; 0: all share.

    Raises `FieldOutOfRange`.
    """

    replicas: int
    prefill: int
    standby: bool
    gpus: int

    def __post_init__(self) -> None:
        if not 0 <= self.prefill < self.replicas:
            message = f"--prefill-replicas must be from 0 to {self.replicas - 1}, as sessions need a replica too"
            raise FieldOutOfRange(message, param="prefill_replicas")
        if self.gpus < 0:
            raise FieldOutOfRange(f"--replica-gpus must be 0 or more, not {self.gpus}", param="replica_gpus")

    def roles(self) -> list[str]:
        """The role of each replica, those that compute prompts last."""
        others = "decode" if self.prefill else "both"
        return [others] * (self.replicas - self.prefill) + ["prefill"] * self.prefill


def serve(settings: Settings, given: Mapping[str, object], plan: Plan) -> int:
    """Start replicas, and keep them running until told to end. Returns the exit status. Raises `FieldOutOfRange`.

    `given` are the settings that flags have given. Those of the environment are the replicas' too.
    """
    settings.require_safe_access()
    configure(Log(logging.INFO, settings.log_format))
    if settings.state_dir is None:
        message = "state_dir: a cluster needs a folder, by which its replicas know each other and keep their sessions"
        raise FieldOutOfRange(message, param="state_dir")
    folder = settings.state_dir.expanduser() / FOLDER
    flags = {name: _variable(value) for name, value in given.items()}
    shared = {name: value for name, value in {**variables(), **flags}.items() if name not in NOT_SHARED}
    # Replicas listen on loopback, and must answer to the names that clients call the cluster by.
    shared["allowed_hosts"] = ",".join(dict.fromkeys((*settings.answered_hosts, *LOOPBACK_NAMES)))
    with Hangups.heard() as hangups, bind(settings.host, settings.port) as bound:
        launcher = Launcher(Replicas(replica_specs(plan, folder, shared, bound.fileno())), bound)
        asyncio.run(launcher.run(hangups))
    if launcher.failure is not None:
        raise FieldOutOfRange(launcher.failure)
    return 0


class Launcher:
    """Keeps the replicas running until a signal says that they end: SIGTERM or SIGINT drains all, a second one ends
    them at once. SIGHUP has them read their files again.
    """

    def __init__(self, replicas: Replicas, bound: socket.socket) -> None:
        """`bound` is the socket that they share."""
        self.failure: str | None = None
        """Why there was nothing to serve."""
        self._replicas = replicas
        self._bound = bound
        self._ending = asyncio.Event()
        self._told_at = 0.0

    async def run(self, hangups: Hangups) -> None:
        """Return when all replicas have ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)

        def reload() -> None:
            loop.call_soon_threadsafe(self._replicas.reload)

        hangups.hand_to(reload)
        self._replicas.start()
        try:
            if await self._are_up():
                names = ", ".join(f"{name} {url}" for name, url in sorted(self._replicas.urls().items()))
                print(f"Djinn's cluster is {url_of(self._bound)}, by its replicas {names}", flush=True)
            await self._ending.wait()
            self._bound.close()  # only replicas take connections now, as long as they do
            await self._replicas.stop()
        finally:
            self._replicas.kill()

    async def _are_up(self) -> bool:
        """Whether all replicas listen: False if that was not waited for."""
        while not self._ending.is_set():
            try:
                self._replicas.urls()
            except NeverStarted as error:
                self.failure = error.message
                self._ending.set()
                return False
            if self._replicas.all_listen:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    def _end(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._ending.is_set() and (number is not signal.SIGTERM or now - self._told_at >= ECHO_S):
            self._replicas.kill()
        elif not self._ending.is_set():
            self._told_at = now
            self._ending.set()


def replica_specs(plan: Plan, folder: Path, shared: Mapping[str, str], descriptor: int) -> list[ReplicaSpec]:
    """The replicas, each with settings that all share, and with the socket of that `descriptor`. Raises
    `FieldOutOfRange`.
    """
    names = _names(plan.replicas)
    try:
        key = _key_file(folder)
    except OSError as error:
        raise FieldOutOfRange(f"state_dir: {folder} cannot be written: {explain(error)}", param="state_dir") from error
    common = {**shared, "cluster": f"folder:{folder}", "cluster_key_file": str(key)}
    return [
        ReplicaSpec(
            name=name,
            host=LOOPBACK,
            port=port,
            state_dir=folder / name,
            settings={**common, "role": role},
            shared=descriptor,
            has_standby=plan.standby,
            gpus=gpus,
        )
        for name, port, role, gpus in zip(names, _free_ports(len(names)), plan.roles(), _gpus(plan), strict=True)
    ]


def _key_file(folder: Path) -> Path:
    """The file of the cluster's key, which is made once. Raises `OSError`."""
    make_private_folder(folder)
    key = folder / KEY
    if not key.exists():
        fresh = key.with_suffix(".new")  # one that is cut short by a crash must not become the key
        make_private(fresh)
        fresh.write_text(secrets.token_hex(32), encoding="utf-8")
        fresh.rename(key)
    return key


def _free_ports(count: int) -> list[int]:
    """Free ports. A replica keeps its own when it is started again."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _names(count: int) -> list[str]:
    """a, b, ... z, a1, b1, ..."""
    letters = string.ascii_lowercase
    return [letters[i % len(letters)] + (str(i // len(letters)) if i >= len(letters) else "") for i in range(count)]


def _variable(value: object) -> str:
    """A flag's value as `DJINN_*` has it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gpus(plan: Plan) -> list[str | None]:
    """The GPUs of each replica: the next ones of those that this process sees."""
    if not plan.gpus:
        return [None] * plan.replicas
    wanted = plan.gpus * plan.replicas
    seen = os.environ.get(GPUS)
    cards = sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    names = [str(card) for card in range(cards)] if seen is None else [name for name in seen.split(",") if name]
    if len(names) < wanted:
        message = f"{plan.replicas} replicas need {wanted} GPUs, and this process sees {len(names)}"
        raise FieldOutOfRange(message, param="replica_gpus")
    return [",".join(names[first : first + plan.gpus]) for first in range(0, wanted, plan.gpus)]
