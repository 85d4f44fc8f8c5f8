"""What the command line says about the servers to measure."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TypeVar

from loadgen.errors import LoadgenError
from loadgen.peers.options import DEFAULT_KV, add_server_options, read_settings
from loadgen.peers.registry import PEERS, find_peer
from loadgen.peers.serving import ManagedTarget, check_installed
from loadgen.targets import TargetSpec
from loadgen.targets.access import Access, RunningTarget

R = TypeVar("R")

ADDRESS = "://"
"""What makes an address of a target, which is the name of a peer otherwise."""


def add_targets(parser: argparse.ArgumentParser, *, openai: bool = False, kv: str | None = DEFAULT_KV) -> None:
    """`--target`, and what servers are given that are started for the run.

    `openai`: not only Djinn can be measured, and what the servers' processes use is, too. `kv` is the default of --kv;
    an experiment that gives None sets `options.kv` before `read_targets`.
    """
    running = "NAME=URL[#MODEL]" if openai else "NAME=URL"
    speaks = "; with #MODEL it is spoken to as an OpenAI-compatible server, without as Djinn" if openai else ""
    peers = [peer.name for peer in PEERS if openai or peer.served_model is None]
    parser.add_argument(
        "--target",
        action="append",
        required=True,
        metavar="TARGET",
        help=f"{running}, a server that is up{speaks}; or [NAME=]PEER, a server that is started for its run and "
        f"stopped after it: {', '.join(peers)}. Repeat to compare",
    )
    parser.add_argument("--api-key", action="append", default=[], metavar="NAME=KEY", help="key of a target that is up")
    if openai:
        parser.add_argument("--pid", action="append", metavar="NAME=PID", help="process of a target that is up")
    parser.set_defaults(pid=[], peers=peers)
    add_server_options(parser.add_argument_group("servers that are started for the run"), kv=kv)


def read_targets(options: argparse.Namespace, context_tokens: int | None = None) -> list[Access]:
    """The targets, none of which is asked for anything yet. `context_tokens`: the longest that a conversation becomes.

    Raises `LoadgenError` for a name given twice, a peer that is unknown, not installed or of no use here, and a key or
    process of no target that is up.
    """
    up = {text.partition("=")[0]: TargetSpec.parse(text) for text in options.target if ADDRESS in text}
    for name, key in _read_pairs("--api-key", options.api_key, up).items():
        up[name] = replace(up[name], api_key=key)
    for name, pid in _read_pairs("--pid", options.pid, up).items():
        if not pid.isdecimal():
            raise LoadgenError(f"--pid is NAME=PID with a number, not {pid!r}")
        up[name] = replace(up[name], pid=int(pid))
    targets = [
        RunningTarget(up[text.partition("=")[0]]) if ADDRESS in text else _managed(text, options, context_tokens)
        for text in options.target
    ]
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise LoadgenError(f"every target needs a name of its own: {', '.join(names)}")
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


def _managed(text: str, options: argparse.Namespace, context_tokens: int | None) -> Access:
    name, separator, peer = text.rpartition("=")
    if separator and not name:
        raise LoadgenError(f"a target is NAME=URL or [NAME=]PEER, not {text!r}")
    found = find_peer(peer)
    if peer not in options.peers:
        raise LoadgenError(f"{peer} cannot be measured here, only {', '.join(options.peers)}")
    check_installed(found)
    return ManagedTarget(name or peer, found, read_settings(options, context_tokens))


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
