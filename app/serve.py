"""`djinn serve` and `djinn cluster serve`: from settings to servers that run until they are told to end."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import select
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from typing import TYPE_CHECKING, Any, cast

from app.domain.errors import EngineError, FieldOutOfRange
from app.flags import Commands, OneLineParser, add_command, add_flags, settings_of
from app.logs import Log, configure
from app.machine.memory import raise_descriptor_limit
from app.settings import Settings

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from app.engine_process.engine import EngineProcess


LOOK_S = 1.0
"""Between two looks at the engine of a server that stands by."""
SPIN_COUNT = "4000"
"""How long PyTorch's OpenMP threads spin at the end of an operator, read when PyTorch is loaded. By default they
spin for milliseconds, which is no faster on an idle machine and ruinous as soon as anything else wants a core."""


def serve(settings: Settings, *, stands_by: bool = False, shared: int | None = None) -> int:
    """Load the model and serve it. Returns with what the process should end. Raises `DjinnError`.

    One that `stands_by` imports everything, then waits for a line of standard input before it takes its port and its
    state folder. If the input ends instead, the process ends. It ends too if its engine's process dies.

    `shared` is the descriptor of another socket to take connections of, which the process has inherited.
    """
    from app.web.server import Hangups, bind

    settings.require_safe_access()
    configure(Log(logging.INFO, settings.log_format, settings.replica))
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    _do_without_pytorch()
    descriptors = raise_descriptor_limit()
    with Hangups.heard() as hangups, ExitStack() as held:
        bound = None if stands_by else held.enter_context(bind(settings.host, settings.port))
        # Imports take seconds: --help and a wrong flag need not wait for them.
        with _no_garbage_collected():
            from app.engine_process.engine import EngineProcess

            # It imports PyTorch meanwhile.
            process = EngineProcess(settings.engine_timeout_s, stuck_s=settings.engine_stuck_s)
            from app.main import load_app, prepare
            from app.web.connections import Caps
            from app.web.server import ENGINE_LOST, Server

            if bound is None:
                prepare(settings, process)
                logger.info("%s stands by: it waits for a line of standard input", settings.replica or "the server")
                if (status := _wait_until_wanted(process)) is not None:
                    return status
                bound = held.enter_context(bind(settings.host, settings.port))
            try:
                application = load_app(settings, process)
            except EngineError as error:
                if not stands_by:
                    raise
                # It died as it was wanted. No setting is wrong: another process can have another engine.
                logger.critical("%s", error)
                return ENGINE_LOST
        server = Server(application, Caps.of(settings, descriptors), hangups)
        server.run([bound] if shared is None else [bound, socket.socket(fileno=shared)])
    return server.status


def _do_without_pytorch() -> None:
    """Keep PyTorch out of this process: only the engine's has tensors. Transformers, which would import it, then reads
    configurations and tokenizers all the same, in 3 s less and with a quarter of the memory.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch was not found
    sys.modules.setdefault("torch", cast("Any", None))


def _wait_until_wanted(process: EngineProcess) -> int | None:
    """Wait for a line of standard input. With what this process should end if none comes: the input has ended, or the
    engine's process has, without which no request is served.
    """
    from app.web.server import ENDED, ENGINE_LOST

    while process.is_running:
        if sys.stdin is None or select.select([sys.stdin], [], [], LOOK_S)[0]:
            if sys.stdin is not None and sys.stdin.buffer.readline():
                return None
            process.close()
            return ENDED
    process.close()
    return ENGINE_LOST


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Within this context, which makes a million objects and hardly any garbage, Python looks for none. It would take a
    fifth of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


MOST_REPLICAS = 64
FORGET, ENDED = "forget", "ended"


def add_cluster_flags(parser: OneLineParser) -> None:
    """Add `serve`, and what operators say of replicas that are gone."""
    actions: Commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_serve(add_command(actions, "serve", "start replicas that listen on one port together"))
    for action, about in {
        FORGET: "give up a replica and its sessions for good, as its folder is lost",
        ENDED: "say that a replica is dead, so that a copy of its folder may go on",
    }.items():
        telling = add_command(actions, action, about)
        telling.add_argument("name", metavar="NAME", help="the replica, by its --replica")
        telling.add_argument(
            "--cluster",
            metavar="STORE",
            default=os.environ.get("DJINN_CLUSTER"),
            help="as `djinn serve` has it (default: what DJINN_CLUSTER says)",
        )


def run_cluster(arguments: argparse.Namespace) -> int:
    """Do what the command says; returns the exit status. Raises `DjinnError`."""
    if arguments.action in (FORGET, ENDED):
        return _tell_of_the_gone(arguments.action, arguments.name, arguments.cluster)
    from app import replicas  # imports the web framework

    settings = settings_of(arguments)
    for name in replicas.OF_CLUSTER:
        if getattr(settings, name) is not None:
            raise FieldOutOfRange(f"{name}: a cluster names and knows its replicas itself", param=name)
    if settings.bind_by_prefix:
        message = "bind_by_prefix: histories are at one replica each, and no other can tell whose a call continues"
        raise FieldOutOfRange(message, param="bind_by_prefix")
    given = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    plan = replicas.Plan(
        replicas=arguments.replicas,
        prefill=arguments.prefill_replicas,
        standby=arguments.standby,
        gpus=arguments.replica_gpus,
    )
    return replicas.serve(settings, given, plan)


def _tell_of_the_gone(action: str, name: str, address: str | None) -> int:
    from app.cluster.claims import declare_dead, open_store

    if address is None:
        raise FieldOutOfRange("cluster: name the store of the cluster", param="cluster")
    store = open_store(address)

    async def tell() -> None:
        async with aclosing(store):
            journal = await declare_dead(store, name, is_lost=action == FORGET)
            if action == FORGET:
                print(f"{name} is forgotten: no server can start with its journal {journal} any more")
            else:
                print(f"{name} may be started again, from a copy of its folder too")

    asyncio.run(tell())
    return 0


def _add_serve(serve: OneLineParser) -> None:
    serve.add_argument("--replicas", type=_count, default=2, metavar="COUNT", help="servers, 1 to 64 (default: 2)")
    serve.add_argument(
        "--prefill-replicas",
        type=int,
        default=0,
        metavar="COUNT",
        help="how many of them only compute long prompts for the others (default: 0, each computes its own)",
    )
    serve.add_argument(
        "--standby",
        action="store_true",
        help="keep a second process of each replica, some 260 MiB, which takes its place sooner than a new one when it "
        "dies",
    )
    serve.add_argument(
        "--replica-gpus",
        type=int,
        default=0,
        metavar="COUNT",
        help="GPUs that each has for itself (default: 0, all see all GPUs)",
    )
    add_flags(serve)


def _count(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if not 1 <= count <= MOST_REPLICAS:
        raise argparse.ArgumentTypeError(f"1 to {MOST_REPLICAS} replicas, not {text}")
    return count
