"""What command lines say about servers that the load generator starts."""

import argparse
import re
from collections.abc import Collection
from pathlib import Path

from loadgen.errors import LoadgenError
from loadgen.peers.base import ServerSettings
from loadgen.peers.dtypes import AUTO, CHOICES
from loadgen.processes.folders import default_model

DEFAULT_KV = "20x1024"
SERVER_OPTIONS = ("model", "dtype", "kv")


def add_server_options(parser: argparse._ActionsContainer, *, kv: str | None = DEFAULT_KV, dtype: str = AUTO) -> None:
    """The options that `read_settings` reads. `kv` is the default of --kv, None if it depends on the experiment."""
    parser.add_argument("--model", type=Path, metavar="DIR", help=f"a Transformers folder (default: {default_model()})")
    parser.add_argument(
        "--dtype",
        choices=CHOICES,
        help=f"of weights and KV (default: {dtype}); auto: each server in its best type",
    )
    parser.add_argument(
        "--kv",
        type=kv_tokens,
        metavar="SESSIONSxTOKENS",
        help=f"room for KV on the device (default: {'what the experiment needs' if kv is None else kv})",
    )
    parser.set_defaults(default_kv=None if kv is None else kv_tokens(kv), default_dtype=dtype)


def read_settings(
    options: argparse.Namespace, *, context_tokens: int | None = None, kv_tokens: int | None = None
) -> ServerSettings:
    """What the servers are given. `context_tokens` is the longest that a conversation becomes, `kv_tokens` what the
    experiment needs unless --kv is given.

    Raises `LoadgenError` if there is no model.
    """
    model = (options.model or default_model()).expanduser().absolute()
    if not (model / "config.json").is_file():
        raise LoadgenError(f"no model in {model}: `djinn models export smollm2-135m-instruct`, or another --model")
    kv = options.kv or kv_tokens or options.default_kv
    return ServerSettings(model, options.dtype or options.default_dtype, kv, context_tokens)


def refuse_server_options(options: argparse.Namespace, *, but: Collection[str] = ()) -> None:
    """Raise `LoadgenError` if one was given: nothing is started that it could be for."""
    for name in SERVER_OPTIONS:
        if name not in but and getattr(options, name) is not None:
            raise LoadgenError(f"--{name} is for servers that are started for the run, and all targets are up already")


def kv_tokens(text: str) -> int:
    """`20x1024` is 20,480."""
    if (found := re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)", text)) is None:
        raise argparse.ArgumentTypeError(f"must be SESSIONSxTOKENS, such as {DEFAULT_KV}, not {text!r}")
    return int(found[1]) * int(found[2])
