"""`djinn cluster serve` and `djinn cluster front`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.cluster.acquainting import acquaint, free_ports, urls_of
from app.cluster.fleet import Fleet
from app.cluster.front.server import Front, FrontServer
from app.cluster.keeper import GPUS, NeverStarted, Replicas, ReplicaSpec
from app.cluster.load import READY
from app.cluster.moves.key import ClusterKey
from app.cluster.moves.signatures import sign_request
from app.cluster.table import Table
from app.domain.errors import FieldOutOfRange
from app.domain.text import LOOPBACK_NAMES
from app.logs import Log, configure
from app.machine.files import explain
from app.machine.memory import raise_descriptor_limit
from app.settings import Settings, variables
from app.web.connections import Caps
from app.web.listener import bind
from app.web.server import Hangups

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LOOK_S, START_LOOK_S = 1.0, 0.1
"""Between two looks at where the replicas listen."""
NOT_SHARED = frozenset({"host", "port", "replica", "state_dir", "max_connections_per_address"})
"""Settings that each replica has of its own. All clients come to it from the front door's address."""
OF_CLUSTER = ("replica", "peers", "cluster_key_file")
"""Settings that a cluster sets itself for its replicas."""
FOLDER = "cluster"
"""Below `--state-dir`: the directory's file, and a folder for each replica."""


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


class ClusterServer(FrontServer):
    """A front door whose replicas end with it: they drain while it still answers."""

    def __init__(self, front: Front, caps: Caps, replicas: Replicas, hangups: Hangups) -> None:
        super().__init__(front, caps, hangups=hangups)
        self._replicas = replicas
        self._following: asyncio.Task[None] | None = None
        self.failure: str | None = None
        """Why there is nothing to serve any more."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the replicas, then listen."""
        self._replicas.start()
        if await self._wait_for_replicas():
            await super().startup(sockets)
            self._following = asyncio.create_task(self._follow())

    async def _wait_for_replicas(self) -> bool:
        """Whether all of them listen: False if that was not waited for."""
        while not self.should_exit:
            try:
                urls = self._replicas.urls()
            except NeverStarted as error:
                self.failure, self.should_exit = error.message, True
                return False
            self.front.fleet.replace(urls)
            if self._replicas.all_listen:
                return True
            await asyncio.sleep(START_LOOK_S)
        return False

    async def _follow(self) -> None:
        """Learn where replicas listen that were started again. One that is away keeps its place."""
        fleet = self.front.fleet
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                urls = self._replicas.urls()
            except NeverStarted:
                continue  # only a first start can fail for good
            fleet.replace({each.name: each.url for each in fleet} | urls)

    def reload(self) -> None:
        """Have the replicas read their files again too."""
        super().reload()
        self._replicas.reload()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the replicas, then close."""
        if self._following is not None:
            self._following.cancel()
        draining = asyncio.create_task(self._replicas.stop())
        while not draining.done() and not self.force_exit:
            await asyncio.wait({draining}, timeout=0.1)
        if not draining.done():
            self._replicas.kill()
            draining.cancel()
        await super().shutdown(sockets)


def serve(settings: Settings, given: Mapping[str, object], plan: Plan) -> int:
    """Start replicas and a front door before them, and serve until told to end. Returns the exit status.

    `given` are the settings that flags have given. Those of the environment are the replicas' too, on any machine.
    """
    settings.require_safe_access()
    configure(Log(logging.INFO, settings.log_format))
    folder = None if settings.state_dir is None else settings.state_dir.expanduser() / FOLDER
    flags = {name: _variable(value) for name, value in given.items()}
    shared = {name: value for name, value in {**variables(), **flags}.items() if name not in NOT_SHARED}
    # Replicas listen on loopback, and must answer to the names that clients call the front door by.
    shared["allowed_hosts"] = ",".join(dict.fromkeys((*settings.answered_hosts, *LOOPBACK_NAMES)))
    specs = replica_specs(plan, folder, shared)
    with Hangups.heard() as hangups, bind(settings.host, settings.port) as bound:
        replicas, table = Replicas(specs), Table(folder)
        try:
            front = Front(settings, Fleet({}), table, _signing(specs[0].settings.get("cluster_key_file")))
            server = ClusterServer(front, _caps(settings), replicas, hangups)
            server.run([bound])
        finally:
            replicas.kill()
            table.close()
    if server.failure is not None:
        raise FieldOutOfRange(server.failure)
    return 0


def front(settings: Settings, urls: Mapping[str, str]) -> int:
    """A front door before replicas that are started elsewhere, at these URLs by name. Returns the exit status."""
    settings.require_safe_access()
    configure(Log(logging.INFO, settings.log_format))
    fleet = Fleet(urls)
    folder = None if settings.state_dir is None else settings.state_dir.expanduser() / FOLDER
    with Hangups.heard() as hangups, bind(settings.host, settings.port) as bound:
        door = Front(settings, fleet, Table(folder), _signing(settings.cluster_key_file))
        FrontServer(door, _caps(settings), hangups=hangups).run([bound])
    return 0


def replica_specs(plan: Plan, folder: Path | None, shared: dict[str, str]) -> list[ReplicaSpec]:
    """The replicas, each with settings that all share. Raises `FieldOutOfRange`."""
    names = _names(plan.replicas)
    ports = free_ports(LOOPBACK, len(names))
    # No session moves without a folder, as no replica would know which one has it.
    if folder is not None:
        shared = shared | _acquaint(folder, urls_of(LOOPBACK, names, ports))
    elif plan.prefill:
        message = "--prefill-replicas needs a --state-dir, by which replicas know each other"
        raise FieldOutOfRange(message, param="prefill_replicas")
    return [
        ReplicaSpec(
            name=name,
            host=LOOPBACK,
            port=port,
            state_dir=None if folder is None else folder / name,
            settings={**shared, "role": role},
            has_standby=plan.standby,
            gpus=gpus,
        )
        for name, port, role, gpus in zip(names, ports, plan.roles(), _gpus(plan), strict=True)
    ]


def _acquaint(folder: Path, urls: Mapping[str, str]) -> dict[str, str]:
    """Raises `FieldOutOfRange`."""
    try:
        return acquaint(folder, urls)
    except OSError as error:
        raise FieldOutOfRange(f"state_dir: {folder} cannot be written: {explain(error)}", param="state_dir") from error


def _signing(key_file: str | Path | None) -> Callable[[str], Mapping[str, str]]:
    """Signs looks at replicas with the cluster's key, if there is one. Raises `FieldOutOfRange`."""
    if key_file is None:
        return lambda name: {}
    key = ClusterKey.read(Path(key_file).expanduser())
    return lambda name: sign_request(key, name, READY, b"")


def _caps(settings: Settings) -> Caps:
    return Caps.of(settings, raise_descriptor_limit())


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
