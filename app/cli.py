"""The command line: `djinn serve`, `djinn doctor`, `djinn models pull`, `djinn models list`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from pydantic import ValidationError

from app.domain.errors import DjinnError
from app.settings import Settings

USAGE_ERROR = 2
INTERRUPTED = 130
"""What a shell reports of a process that Ctrl-C has ended."""
SPIN_COUNT = "4000"
"""How long PyTorch's OpenMP threads spin at the end of an operator, read when PyTorch is loaded. By default they
spin for milliseconds, which is no faster on an idle machine and ruinous as soon as anything else wants a core."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status. What the user got wrong is a message and status 2."""
    parser = _parser()
    arguments, flags = parser.parse_known_args(argv)
    if flags and arguments.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    try:
        if arguments.command == "serve":
            _serve(Settings(_cli_parse_args=flags))
        elif arguments.command == "doctor":
            return _doctor(arguments)
        else:
            _models(arguments.action, getattr(arguments, "name", ""))
    except ValidationError as error:
        for problem in error.errors():
            name = "-".join(map(str, problem["loc"]))
            print(f"djinn: {_flag(name) + ': ' if name else ''}{problem['msg']}", file=sys.stderr)
        return USAGE_ERROR
    except DjinnError as error:
        print(f"djinn: {_name_flag(error)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _name_flag(error: DjinnError) -> str:
    """The error's message, with the flag of the setting that it is about instead of the setting's name, where that is
    no word of the language.
    """
    name = error.param or ""
    is_name = "_" in name and name in Settings.model_fields
    return error.message.replace(name, _flag(name)) if is_name else error.message


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("djinn", description="A server for language-model sessions.")
    parser.add_argument("--version", action="version", version=f"djinn {version('djinn')}")
    commands = parser.add_subparsers(dest="command", required=True)
    # Settings reads the flags of `serve`, --help among them.
    commands.add_parser("serve", add_help=False, help="load a model and serve it over HTTP")
    doctor = commands.add_parser("doctor", help="examine this machine before anything is measured on it")
    for setting, metavar in (("device", "NAME"), ("state-dir", "FOLDER")):
        doctor.add_argument(f"--{setting}", metavar=metavar, default=argparse.SUPPRESS, help="as `djinn serve` has it")
    doctor.add_argument("--json", action="store_true", help="all facts too, for programs")
    models = commands.add_parser("models", help="the models that Djinn knows by name")
    actions = models.add_subparsers(dest="action", required=True)
    actions.add_parser("pull", help="fetch a model").add_argument("name")
    actions.add_parser("list", help="what there is, and what is here already")
    return parser


def _serve(settings: Settings) -> None:
    from app.web.server import Server, bind

    logging.basicConfig(level=logging.INFO, format="djinn: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with bind(settings.host, settings.port) as bound:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        # Importing PyTorch and Transformers takes seconds: --help and a wrong flag need not wait for it.
        from app.main import load_app

        Server(load_app(settings)).run([bound])


def _doctor(arguments: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    settings = Settings(**given)
    from app.doctor.command import diagnose  # imports PyTorch

    state_dir = None if settings.state_dir is None else settings.state_dir.expanduser()
    return diagnose(settings.device, state_dir, as_json=arguments.json)


def _models(action: str, name: str) -> None:
    from app.model_store import commands

    cache_dir = Settings().cache_dir.expanduser()
    if action == "pull":
        commands.pull(name, cache_dir)
    else:
        commands.list_models(cache_dir)
