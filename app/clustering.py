"""The flags of `djinn cluster`. `app/cluster/command.py` does what they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.domain.errors import FieldOutOfRange
from app.flags import OneLineParser, add_flags, settings_of
from app.settings import Settings

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[OneLineParser]

CONTROLS = ("auto", "ray", "processes")
"""What may start the replicas of a cluster."""
MOST_REPLICAS = 64


def add_cluster_flags(parser: OneLineParser, add_command: Callable[[Commands, str, str], OneLineParser]) -> None:
    """Add `serve` and `front`, each by `add_command`."""
    actions: Commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_serve(add_command(actions, "serve", "start replicas and a front door before them"))
    _add_front(add_command(actions, "front", "a front door before replicas that run already"))


def run_cluster(arguments: argparse.Namespace) -> int:
    """Do what the command says; returns the exit status. Raises `DjinnError`."""
    from app.cluster import command  # imports the web framework

    settings = settings_of(arguments)
    for name in command.OF_CLUSTER:
        if getattr(settings, name) is not None:
            raise FieldOutOfRange(f"{name}: a cluster names and knows its replicas itself", param=name)
    if settings.bind_by_prefix:
        message = (
            "bind_by_prefix: histories are at one replica each, and the front door cannot tell whose a call continues"
        )
        raise FieldOutOfRange(message, param="bind_by_prefix")
    if arguments.action == "front":
        pairs = (target.partition("=") for target in arguments.target)
        return command.front(settings, {name: url for name, _, url in pairs})
    given = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    plan = command.Plan(
        replicas=arguments.replicas,
        prefill=arguments.prefill_replicas,
        standby=arguments.standby,
        control=arguments.control,
        address=arguments.ray_address,
        gpus=arguments.replica_gpus,
    )
    return command.serve(settings, given, plan)


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
        "--control",
        choices=CONTROLS,
        default="auto",
        metavar=f"{{{','.join(CONTROLS)}}}",
        help="who starts replicas: ray (pip install 'djinn-server[cluster]'), processes of this one, or auto: ray "
        "where it is installed (default: auto)",
    )
    serve.add_argument(
        "--ray-address", metavar="ADDRESS", help="a cluster of Ray's that runs (default: started on this machine)"
    )
    serve.add_argument(
        "--replica-gpus", type=float, default=0.0, metavar="COUNT", help="GPUs of Ray's for each (default: 0)"
    )
    add_flags(serve)


def _add_front(front: OneLineParser) -> None:
    front.add_argument(
        "--target",
        action="append",
        required=True,
        metavar="NAME=URL",
        help="a replica, by its --replica; once for each",
    )
    add_flags(front)


def _count(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if not 1 <= count <= MOST_REPLICAS:
        raise argparse.ArgumentTypeError(f"1 to {MOST_REPLICAS} replicas, not {text}")
    return count
