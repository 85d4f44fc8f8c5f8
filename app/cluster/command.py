"""`djinn cluster serve`: replicas on this machine that share one port.

No process stands between them and their clients: this one binds the socket of `--port`, and each replica inherits it.
While a replica is dead or stopped, the others accept the connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import string
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from app.cluster.keeper import GPUS, Replicas, ReplicaSpec
from app.domain.errors import FieldOutOfRange
from app.domain.text import LOOPBACK_NAMES
from app.logs import Log, configure
from app.machine.files import explain, make_private, make_private_folder
from app.settings import Settings, variables
from app.web.listener import bind
from app.web.server import Hangups

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
NOT_SHARED = frozenset({"host", "port", "replica", "state_dir"})
"""Settings that each replica has of its own."""
OF_CLUSTER = ("replica", "cluster", "advertise", "cluster_key_file")
"""Settings that the cluster chooses for its replicas."""
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
        asyncio.run(Replicas(replica_specs(plan, folder, shared, bound.fileno())).run(bound, hangups))
    return 0


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
    """The file with the cluster's key, made at the first start. Raises `OSError`."""
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
    """A flag's value as a `DJINN_*` variable has it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gpus(plan: Plan) -> list[str | None]:
    """The GPUs of each replica, taken in order from those that this process sees."""
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
