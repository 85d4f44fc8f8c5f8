"""`python -m loadgen peers`: install, start and stop the servers that Djinn is compared with."""

import argparse

from rich.console import Console
from rich.table import Table

from loadgen.options.common import EXIT_OK
from loadgen.options.targets import add_server_options, read_settings
from loadgen.peers import serving
from loadgen.peers.base import Peer
from loadgen.peers.registry import PEERS, find_peer

NAMES = ", ".join(peer.name for peer in PEERS)


def add_options(parser: argparse.ArgumentParser) -> None:
    """One subcommand for each thing that can be done with a peer."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="what there is, and what of it runs").set_defaults(act=_list)
    install = actions.add_parser("install", help="make it ready to start, in its own environment")
    start = actions.add_parser("start", help="start it and leave it running")
    stop = actions.add_parser("stop", help="stop it with all of its processes")
    for action, act in ((install, _install), (start, _start), (stop, _stop)):
        action.add_argument("peer", metavar="PEER", help=NAMES)
        action.set_defaults(act=act)
    add_server_options(start)
    start.add_argument("--port", type=_port, metavar="N", help="of the loopback address (default: a free one)")


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run the action; returns the exit code. Raises `LoadgenError`."""
    options.act(options, progress)
    return EXIT_OK


def _list(_options: argparse.Namespace, _progress: Console) -> None:
    table = Table("peer", "installed", "runs on", "process")
    for peer in PEERS:
        note = serving.running(peer)
        place = ("", "") if note is None else (note.url, str(note.pid))
        table.add_row(peer.name, _installed(peer), *place)
    Console(highlight=False).print(table)


def _installed(peer: Peer) -> str:
    if not peer.is_installed():
        return "no"
    return ", ".join(f"{name} {version}" for name, version in peer.versions().items())


def _install(options: argparse.Namespace, progress: Console) -> None:
    peer = find_peer(options.peer)
    peer.install(lambda line: progress.print(line, markup=False, highlight=False))
    print(f"{peer.name} is installed")


def _start(options: argparse.Namespace, progress: Console) -> None:
    peer, settings = find_peer(options.peer), read_settings(options)
    with progress.status(f"{options.peer} starts"):
        served = serving.start(peer, settings, options.port)
    print(f"{served.name} runs on {served.url} as process {served.pid}; its log is {served.log}")
    print(f"--target {served.target}")


def _stop(options: argparse.Namespace, progress: Console) -> None:
    with progress.status(f"{options.peer} stops"):
        note = serving.stop(find_peer(options.peer))
    print(f"{options.peer} has stopped: process {note.pid}")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"must be from 1 to 65535, not {text!r}")
    return int(text)
