"""The command line: one function for each command of `djinn`, `serve` first."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import shtab
from pydantic import ValidationError

from app.demo import bench, demo
from app.domain.errors import DjinnError, FieldOutOfRange
from app.domain.values import SessionState, Tier
from app.flags import USAGE_ERROR, Commands, OneLineParser, add_command, add_flags, in_flags, settings_of
from app.model_store.pull import CATALOG
from app.serve import add_cluster_flags, run_cluster, serve
from app.settings import Settings

PLACES = {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY}
"""What a flag's value is on this machine, by its metavar."""
MODELS = ("MODEL", "NAME")


SHELLS = ("bash", "zsh", "fish")
"""Those that `djinn completion` writes a script for."""
INTERRUPTED = 130
"""What a shell reports of a process that Ctrl-C has ended."""
KEY = "An API key comes from DJINN_API_KEY: others can see arguments in the list of processes."
STATES = [state.value for state in SessionState if state is not SessionState.CLOSED]
SAMPLING = {"max_tokens": "COUNT", "temperature": "NUMBER", "seed": "NUMBER"}
"""Fields of a turn that `djinn chat` has flags for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status. A mistake of the user is a message and status 2."""
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            arguments.parser.refuse(unknown)
        status: int | None = arguments.run(arguments)
    except ValidationError as error:
        from app.web.errors import described  # imports FastAPI, which most commands do without

        for field, words in described(Settings, error):
            said = f"{field}: {words}" if field else words
            print(f"djinn: {in_flags(said, about=said.partition(':')[0])}", file=sys.stderr)
        return USAGE_ERROR
    except DjinnError as error:
        print(f"djinn: {in_flags(error.message, about=error.param)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser("djinn", description="An inference server for agents.")
    parser.add_argument("--version", action=_ShowVersion, help="what is installed, and what it would serve with")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serving = add_command(commands, "serve", "load a model and serve it over HTTP", _serve)
    serving.epilog = "DJINN_<NAME> sets the same from the environment, for example DJINN_PORT; a flag wins."
    serving.add_argument(
        "--standby",
        action="store_true",
        help="import everything, then wait for a line of standard input: what `djinn cluster serve --standby` starts",
    )
    serving.add_argument(
        "--shared-socket",
        type=int,
        metavar="DESCRIPTOR",
        help="take connections of this inherited socket too: what `djinn cluster serve` gives its replicas",
    )
    add_flags(serving)
    add_cluster_flags(add_command(commands, "cluster", "several servers that act as one", run_cluster))
    showing = add_command(commands, "demo", "serve a model to a dozen agents, and show them in the browser")
    showing.set_defaults(run=lambda given: demo(given.model, port=given.port, opens=given.open))
    showing.add_argument(
        "--model",
        metavar="MODEL",
        default=Settings.model_fields["model"].default,
        help="as `djinn serve` has it (default: %(default)s)",
    )
    showing.add_argument("--port", type=int, metavar="PORT", default=0, help="port to listen on (default: a free one)")
    showing.add_argument("--open", action="store_true", help="open the page in the browser")
    comparing = add_command(commands, "bench", "compare Djinn with the other installed servers")
    comparing.set_defaults(run=lambda given: bench(given.output, given.rivals, full=given.full))
    comparing.add_argument("--full", action="store_true", help="hours, with eighty agents (default: some minutes)")
    comparing.add_argument(
        "--rivals", metavar="PEER[,PEER...]", help="the other servers, or none (default: those that are installed)"
    )
    comparing.add_argument(
        "--output", metavar="FOLDER", default="report", help="where the reports go (default: %(default)s)"
    )
    _add_shell_commands(commands)
    backup = add_command(commands, "backup", "copy a state folder, also while a server uses it", _back_up)
    backup.add_argument("folder", metavar="FOLDER", help="the copy: a folder that is empty, or not there yet")
    backup.add_argument("--with-kv", action="store_true", help="KV files too: turns of the copy compute less again")
    _add_settings(backup, ("state-dir", "FOLDER"))
    doctor = add_command(commands, "doctor", "examine this machine before anything is measured on it", _doctor)
    doctor.add_argument("model", metavar="MODEL", nargs="?", help="a model that this machine may serve")
    _add_settings(doctor, ("device", "NAME"), ("state-dir", "FOLDER"), ("cache-dir", "FOLDER"))
    _add_settings(doctor, ("dtype", "NAME"), ("weights-dtype", "NAME"))
    doctor.add_argument("--weights", action="store_true", help="read the copies of streamed weights wholly: minutes")
    doctor.add_argument("--json", action="store_true", help="all facts too, for programs")
    keys = add_command(commands, "keys", "API keys of tenants", _new_key)
    making = keys.add_subparsers(dest="action", metavar="ACTION", required=True)
    making.add_parser("new", help="make a key, and its digest for the file of --tenants")
    models = add_command(commands, "models", "the models that Djinn knows by name", _models)
    actions = models.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("pull", help="fetch a model").add_argument("name", metavar="NAME")
    actions.add_parser("list", help="what there is, and what is here already")
    export = actions.add_parser("export", help="make a Transformers folder of a GGUF file's model, in float32")
    export.add_argument("name", metavar="MODEL", help="a pulled name or a .gguf file")
    completing = add_command(commands, "completion", "a script that lets a shell complete these commands", _complete)
    completing.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    return parser


class _ShowVersion(argparse._VersionAction):
    """Tells more than a version, on lines that are not wrapped, and only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_given: object) -> None:
        from app.doctor.host import describe_installation

        print(describe_installation(Settings()))
        parser.exit()


def _add_settings(command: OneLineParser, *settings: tuple[str, str]) -> None:
    """Flags of some settings, and their metavars."""
    for setting, metavar in settings:
        command.add_argument(f"--{setting}", metavar=metavar, default=argparse.SUPPRESS, help="as `djinn serve` has it")


def _serve(arguments: argparse.Namespace) -> int:
    return serve(settings_of(arguments), stands_by=arguments.standby, shared=arguments.shared_socket)


def _doctor(arguments: argparse.Namespace) -> int:
    named = getattr(arguments, "model", None) is not None
    if not named:
        vars(arguments).pop("model", None)
    settings = settings_of(arguments)
    from app.doctor.examination import diagnose  # imports PyTorch

    return diagnose(settings, reads_weights=arguments.weights, looks_at_model=named, as_json=arguments.json)


def _back_up(arguments: argparse.Namespace) -> None:
    settings = settings_of(arguments)
    from app.backup import back_up

    if settings.state_dir is None:
        raise FieldOutOfRange("state_dir is none: that server keeps nothing", param="state_dir")
    kv_dir = settings.engine().kv_dir if arguments.with_kv else None
    back_up(settings.state_dir.expanduser(), kv_dir, Path(arguments.folder).expanduser())


def _complete(arguments: argparse.Namespace) -> None:
    """The script knows commands, flags, words that a flag takes, models, files and folders."""
    parser = _parser()
    for action in _actions(parser):
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if metavar in PLACES:
            action.complete = PLACES[metavar]  # type: ignore[attr-defined]
        elif metavar.startswith("{"):
            action.choices = metavar.strip("{}").split(",")
        elif metavar in MODELS and action.dest in ("model", "name"):
            action.choices = list(CATALOG)
    print(shtab.complete(parser, arguments.shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of the parser and of each of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)


def _new_key(_arguments: argparse.Namespace) -> None:
    from app.tenants.tenant import digest, new_key  # imports FastAPI, which most commands do without

    key = new_key()
    print(f"key:    {key}\nsha256: {digest(key.encode())}")


def _models(arguments: argparse.Namespace) -> None:
    from app.model_store import commands

    cache_dir = Settings().cache_dir.expanduser()
    if arguments.action == "pull":
        commands.pull(arguments.name, cache_dir)
    elif arguments.action == "export":
        print(commands.export_model(arguments.name, cache_dir))
    else:
        commands.list_models(cache_dir)


def _add_shell_commands(commands: Commands) -> None:
    """Add `ps`, `top` and `chat`. `client/shell/` does what they ask for."""
    _add_ps(add_command(commands, "ps", "list the sessions of a server", _ps))
    showing = add_command(commands, "top", "show what a server does, each second", _top)
    _add_url(showing)
    showing.add_argument(
        "--count", type=_positive, metavar="COUNT", help="end after so many times (default: at Ctrl-C)"
    )
    _add_chat(add_command(commands, "chat", "talk in a session of a server, and stop it between two layers", _chat))


def _add_ps(parser: argparse.ArgumentParser) -> None:
    _add_url(parser)
    parser.add_argument("--state", choices=STATES, metavar="STATE", help=f"only those that are {_either(STATES)}")
    tiers = [tier.value for tier in Tier]
    parser.add_argument("--tier", choices=tiers, metavar="TIER", help=f"only those with their KV in {_either(tiers)}")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")
    form.add_argument("--json", action="store_true", help="all that the server says of them, for programs")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_url(parser)
    parser.add_argument(
        "session", nargs="?", metavar="SESSION", help="an id, or its end; it stays open (default: a new session)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the new session open at the end")
    parser.add_argument("--raw", action="store_true", help="send lines as they are, without the chat template")
    for name, metavar in SAMPLING.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=partial(_field, name),
            metavar=metavar,
            help="as a turn has it (default: the server's)",
        )


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", metavar="URL", help="of the server (default: DJINN_BASE_URL, or else http://127.0.0.1:8000)"
    )
    parser.epilog = KEY


def _either(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"an integer from 1; got {text!r}")
    return int(text)


def _field(name: str, text: str) -> int | float:
    """The value of a field of a turn, within the field's range."""
    from app.web.errors import described  # half a second, which the other commands need not wait for
    from app.wire.turns import SamplingFields

    given: int | float | str = text
    with suppress(ValueError):
        given = int(text) if text.lstrip("+-").isdecimal() else float(text)
    try:
        value: int | float = getattr(SamplingFields.model_validate({name: given}), name)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(next(described(SamplingFields, error))[1]) from error
    return value


def _ps(arguments: argparse.Namespace) -> int:
    from client.shell.ps import ps  # imports httpx and NumPy, as the others do: `djinn serve` needs not wait for them

    return ps(arguments.url, state=arguments.state, tier=arguments.tier, watch=arguments.watch, as_json=arguments.json)


def _top(arguments: argparse.Namespace) -> int:
    from client.shell.top import top

    return top(arguments.url, count=arguments.count)


def _chat(arguments: argparse.Namespace) -> int:
    from client.calls import TurnOptions
    from client.shell.chat.program import chat

    given: dict[str, Any] = {name: getattr(arguments, name) for name in SAMPLING}
    sampling: TurnOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    return chat(arguments.url, session=arguments.session, keep=arguments.keep, raw=arguments.raw, sampling=sampling)
