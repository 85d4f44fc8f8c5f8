"""What the command line says about the servers to measure."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TypeVar

from loadgen.errors import LoadgenError
from loadgen.options.servers import DEFAULT_KV, add_server_options, read_settings, refuse_server_options
from loadgen.peers.base import Peer
from loadgen.peers.dtypes import AUTO
from loadgen.peers.registry import PEERS, find_peer
from loadgen.peers.serving import ManagedTarget, check_installed
from loadgen.targets import TargetSpec
from loadgen.targets.access import Access, RunningTarget

R = TypeVar("R")

ADDRESS = "://"
"""What makes an address of a target, which is the name of a peer otherwise."""


def add_targets(
    parser: argparse.ArgumentParser,
    *,
    openai: bool = False,
    kv: str | None = DEFAULT_KV,
    dtype: str = AUTO,
    required: bool = True,
) -> None:
    """`--target`, unless `required` optional, and what servers are given that are started for the run.

    `openai`: not only Djinn can be measured, and what the servers' processes use is, too. `kv` and `dtype` are the
    defaults of --kv and --dtype; an experiment that gives None as `kv` tells `read_targets` what it needs.
    """
    running = "NAME=URL[#MODEL]" if openai else "NAME=URL"
    speaks = "; with #MODEL it is spoken to as an OpenAI-compatible server, without as Djinn" if openai else ""
    peers = [peer.name for peer in PEERS if openai or peer.served_model is None]
    parser.add_argument(
        "--target",
        action="append",
        required=required,
        metavar="TARGET",
        help=f"{running}, a server that is up{speaks}; or [NAME=]PEER, a server that is started for its run and "
        f"stopped after it: {', '.join(peers)}. Repeat to compare",
    )
    parser.add_argument("--api-key", action="append", default=[], metavar="NAME=KEY", help="key of a target that is up")
    if openai:
        parser.add_argument("--pid", action="append", metavar="NAME=PID", help="process of a target that is up")
    parser.set_defaults(pid=[], peers=peers)
    add_server_options(parser.add_argument_group("servers that are started for the run"), kv=kv, dtype=dtype)


def read_targets(
    options: argparse.Namespace,
    *,
    context_tokens: int | None = None,
    kv_tokens: int | None = None,
    read_elsewhere: Collection[str] = (),
) -> list[Access]:
    """The targets, none of which is asked for anything yet. `context_tokens` and `kv_tokens` as in `read_settings`.

    Raises `LoadgenError` for a name given twice, a peer that is unknown, not installed or of no use here, a key or
    process of no target that is up, and an option for servers that are started if none is, but for those that are
    `read_elsewhere`.
    """
    up = {text.partition("=")[0]: TargetSpec.parse(text) for text in options.target if ADDRESS in text}
    for name, key in _read_pairs("--api-key", options.api_key, up).items():
        up[name] = replace(up[name], api_key=key)
    for name, pid in _read_pairs("--pid", options.pid, up).items():
        if not pid.isdecimal():
            raise LoadgenError(f"--pid is NAME=PID with a number, not {pid!r}")
        up[name] = replace(up[name], pid=int(pid))
    managed: dict[str, Access] = {}
    if kinds := {text: _find(text, options.peers) for text in options.target if ADDRESS not in text}:
        settings = read_settings(options, context_tokens=context_tokens, kv_tokens=kv_tokens)
        managed = {text: ManagedTarget(name, peer, settings) for text, (name, peer) in kinds.items()}
    else:
        refuse_server_options(options, but=read_elsewhere)
    targets = [managed.get(text) or RunningTarget(up[text.partition("=")[0]]) for text in options.target]
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise LoadgenError(f"every target needs its own name: {', '.join(names)}")
    return targets


def run_on(targets: Sequence[Access], experiment: Callable[[list[TargetSpec]], Awaitable[R]]) -> R:
    """Run an experiment on targets that are all up from its beginning to its end. Raises `LoadgenError`.

    Ctrl-C while the servers are stopped, which blocks the event loop, does not cost what has been measured.
    """

    async def reach_and_run() -> R:
        async with AsyncExitStack() as stack:
            found = await experiment([await stack.enter_async_context(target.reach()) for target in targets])
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return found

    return asyncio.run(reach_and_run())


def _find(text: str, usable: Collection[str]) -> tuple[str, Peer]:
    """The name of a target and the kind of server that is to be started for it."""
    name, separator, kind = text.rpartition("=")
    if separator and not name:
        raise LoadgenError(f"a target is NAME=URL or [NAME=]PEER, not {text!r}")
    if ":" in kind:
        raise LoadgenError(f"the URL of a target begins with http://: --target {name or 'NAME'}=http://{kind}")
    peer = find_peer(kind)
    if kind not in usable:
        raise LoadgenError(f"this experiment cannot measure {kind}, only {', '.join(usable)}")
    check_installed(peer)
    return name or kind, peer


def _read_pairs(option: str, texts: Sequence[str], up: dict[str, TargetSpec]) -> dict[str, str]:
    """What is said of targets that are up, by name."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:  # what was given may be a key: it is not shown
            raise LoadgenError(f"{option} is NAME=VALUE")
        if name not in up:
            raise LoadgenError(f"{option} for no target that is up: {name}")
        if name in pairs:
            raise LoadgenError(f"{option} is given twice for {name}")
        pairs[name] = value
    return pairs
