"""What the command line says about the servers to measure, about those that are started for it, and about their
agents.
"""

import argparse
import asyncio
import re
import tempfile
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from loadgen.errors import LoadgenError
from loadgen.load.workload import Load, Replay, Workload
from loadgen.options.parser import add_plan_options, flags, given, read_plan
from loadgen.peers.base import AUTO, CHOICES, Peer, ServerSettings
from loadgen.peers.registry import PEERS, find_peer
from loadgen.peers.serving import ManagedTarget, check_installed
from loadgen.processes.launch import default_model
from loadgen.targets import TargetSpec
from loadgen.targets.base import Access, RunningTarget

DEFAULT_KV = "20x1024"
SERVER_OPTIONS = ("model", "dtype", "kv")


def add_server_options(parser: argparse._ActionsContainer) -> None:
    """The options that `read_settings` reads."""
    parser.add_argument("--model", type=Path, metavar="DIR", help=f"a Transformers folder (default: {default_model()})")
    parser.add_argument(
        "--dtype", choices=CHOICES, help=f"of weights and KV (default: {AUTO}); auto: each server in its best type"
    )
    parser.add_argument(
        "--kv", type=kv_tokens, metavar="SESSIONSxTOKENS", help=f"room for KV on the device (default: {DEFAULT_KV})"
    )


def read_settings(options: argparse.Namespace, *, context_tokens: int | None = None) -> ServerSettings:
    """What the servers are given. `context_tokens` is the longest that a conversation becomes. Raises `LoadgenError` if
    there is no model.
    """
    model = (options.model or default_model()).expanduser().absolute()
    if not (model / "config.json").is_file():
        raise LoadgenError(f"no model in {model}: `djinn models export smollm2-135m-instruct`, or another --model")
    return ServerSettings(model, options.dtype or AUTO, options.kv or kv_tokens(DEFAULT_KV), context_tokens)


def refuse_server_options(options: argparse.Namespace) -> None:
    """Raise `LoadgenError` if one was given: nothing is started that it could be for."""
    for name in SERVER_OPTIONS:
        if getattr(options, name) is not None:
            raise LoadgenError(f"--{name} is for servers that are started for the run, and all targets are up already")


def kv_tokens(text: str) -> int:
    """`20x1024` is 20,480."""
    if (found := re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)", text)) is None:
        raise argparse.ArgumentTypeError(f"must be SESSIONSxTOKENS, such as {DEFAULT_KV}, not {text!r}")
    return int(found[1]) * int(found[2])


R = TypeVar("R")

ADDRESS = "://"
"""What makes an address of a target, which is the name of a peer otherwise."""


def add_targets(parser: argparse.ArgumentParser, *, openai: bool = False) -> None:
    """`--target`, and what servers are given that are started for the run. `openai`: not only Djinn can be measured,
    and what the servers' processes use is, too.
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
    add_server_options(parser.add_argument_group("servers that are started for the run"))


def read_targets(options: argparse.Namespace, *, context_tokens: int | None = None) -> list[Access]:
    """The targets, none of which is asked for anything yet. `context_tokens` as in `read_settings`.

    Raises `LoadgenError` for a name given twice, a peer that is unknown, not installed or of no use here, a key or
    process of no target that is up, and an option for servers that are started if none is.
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
        settings = read_settings(options, context_tokens=context_tokens)
        managed = {text: ManagedTarget(name, peer, settings) for text, (name, peer) in kinds.items()}
    else:
        refuse_server_options(options)
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


@contextmanager
def with_disk(targets: Sequence[Access]) -> Iterator[list[Access]]:
    """The targets, of which those that will be started have a folder for KV files; it is gone at the end of the block.

    A server without one takes only the tokens of an imported session, and computes its KV again.
    """
    with tempfile.TemporaryDirectory(prefix="loadgen-state-") as folder:
        yield [
            replace(target, settings=replace(target.settings, state=Path(folder) / f"state-{number}"))
            if isinstance(target, ManagedTarget)
            else target
            for number, target in enumerate(targets)
        ]


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """The fields of `Workload`, and `--trace`, which stands for most of them."""
    parser.add_argument("--trace", type=Path, metavar="FILE", help="do what the agents of this trace did")
    add_plan_options(parser, Workload)


def read_workload(options: argparse.Namespace) -> Workload | Replay:
    """What the options say. Raises `LoadgenError` for values that do not fit, and for any that a trace decides."""
    if options.trace is None:
        return read_plan(options, Workload)
    found = given(options, Workload)
    if decided := found.keys() - {field.name for field in fields(Load)}:
        names = ", ".join(flag for name, flag in flags(Workload).items() if name in decided)
        raise LoadgenError(f"leave out {names}: --trace decides it")
    return Replay(trace=options.trace, **found)
