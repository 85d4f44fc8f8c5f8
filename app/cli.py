"""The command line: one function for each command of `djinn`, `serve` first."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import shtab
from pydantic import ValidationError

from app.demo import bench, demo
from app.domain.errors import DjinnError, FieldOutOfRange
from app.flags import USAGE_ERROR, OneLineParser, add_flags, in_flags, settings_of
from app.model_store.pull import CATALOG
from app.serve import add_cluster_flags, run_cluster, serve
from app.settings import Settings
from app.shell import SHELL_COMMANDS, add_shell_commands, run_shell_command
from app.tenants.tenant import digest, new_key
from app.web.errors import describe_problem
from app.web.schema_words import schema_of

PLACES = {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY}
"""What a flag's value is on this machine, by its metavar."""
MODELS = ("MODEL", "NAME")


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for `shell`: bash, zsh or fish. It knows commands, flags, words that a flag takes, models, files and
    folders. The parser is changed, and is for nothing else then.
    """
    for action in _actions(parser):
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if metavar in PLACES:
            action.complete = PLACES[metavar]  # type: ignore[attr-defined]
        elif metavar.startswith("{"):
            action.choices = metavar.strip("{}").split(",")
        elif metavar in MODELS and action.dest in ("model", "name"):
            action.choices = list(CATALOG)
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of the parser and of each of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)


SHELLS = ("bash", "zsh", "fish")
"""Those that `djinn completion` writes a script for."""
INTERRUPTED = 130
"""What a shell reports of a process that Ctrl-C has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status. A mistake of the user is a message and status 2."""
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            arguments.parser.refuse(unknown)
        if arguments.command == "serve":
            return serve(settings_of(arguments), stands_by=arguments.standby)
        if arguments.command == "cluster":
            return run_cluster(arguments)
        if arguments.command == "doctor":
            return _doctor(arguments)
        if arguments.command == "demo":
            return demo(arguments.model, opens=arguments.open)
        if arguments.command == "bench":
            return bench(arguments.output, arguments.rivals, full=arguments.full)
        if arguments.command in SHELL_COMMANDS:
            return run_shell_command(arguments)
        if arguments.command == "backup":
            _back_up(arguments)
        elif arguments.command == "completion":
            _complete(arguments.shell)
        elif arguments.command == "keys":
            _new_key()
        else:
            _models(arguments.action, getattr(arguments, "name", ""))
    except ValidationError as error:
        for problem in error.errors():
            field, words = describe_problem(schema_of(Settings), dict(problem), problem["loc"])
            said = f"{field}: {words}" if field else words
            print(f"djinn: {in_flags(said, about=said.partition(':')[0])}", file=sys.stderr)
        return USAGE_ERROR
    except DjinnError as error:
        print(f"djinn: {in_flags(error.message, about=error.param)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser("djinn", description="An inference server for agents.")
    parser.add_argument("--version", action=_ShowVersion, help="what is installed, and what it would serve with")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_serve(_add_command(commands, "serve", "load a model and serve it over HTTP"))
    add_cluster_flags(_add_command(commands, "cluster", "several servers behind one front door"), _add_command)
    showing = _add_command(commands, "demo", "serve a model to a dozen agents, and show them in the browser")
    showing.add_argument(
        "--model",
        metavar="MODEL",
        default=Settings.model_fields["model"].default,
        help="as `djinn serve` has it (default: %(default)s)",
    )
    showing.add_argument("--open", action="store_true", help="open the page in the browser")
    _add_bench(_add_command(commands, "bench", "compare Djinn with the other installed servers"))
    add_shell_commands(lambda name, text: _add_command(commands, name, text))
    backup = _add_command(commands, "backup", "copy a state folder, also while a server uses it")
    backup.add_argument("folder", metavar="FOLDER", help="the copy: a folder that is empty, or not there yet")
    backup.add_argument("--with-kv", action="store_true", help="KV files too: turns of the copy compute less again")
    _add_settings(backup, ("state-dir", "FOLDER"))
    doctor = _add_command(commands, "doctor", "examine this machine before anything is measured on it")
    _add_settings(doctor, ("device", "NAME"), ("state-dir", "FOLDER"), ("cache-dir", "FOLDER"))
    doctor.add_argument("--weights", action="store_true", help="read the copies of streamed weights wholly: minutes")
    doctor.add_argument("--json", action="store_true", help="all facts too, for programs")
    keys = _add_command(commands, "keys", "API keys of tenants")
    making = keys.add_subparsers(dest="action", metavar="ACTION", required=True)
    making.add_parser("new", help="make a key, and its digest for the file of --tenants")
    models = _add_command(commands, "models", "the models that Djinn knows by name")
    actions = models.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("pull", help="fetch a model").add_argument("name", metavar="NAME")
    actions.add_parser("list", help="what there is, and what is here already")
    export = actions.add_parser("export", help="make a Transformers folder of a GGUF file's model, in float32")
    export.add_argument("name", metavar="MODEL", help="a pulled name or a .gguf file")
    completing = _add_command(commands, "completion", "a script that lets a shell complete these commands")
    completing.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    return parser


def _add_serve(parser: OneLineParser) -> None:
    parser.epilog = "DJINN_<NAME> sets the same from the environment, for example DJINN_PORT; a flag wins."
    parser.add_argument(
        "--standby",
        action="store_true",
        help="import everything, then wait for a line of standard input: what `djinn cluster serve --standby` starts",
    )
    add_flags(parser)


def _add_bench(parser: OneLineParser) -> None:
    parser.add_argument("--full", action="store_true", help="hours, with eighty agents (default: some minutes)")
    parser.add_argument(
        "--rivals", metavar="PEER[,PEER...]", help="the other servers, or none (default: those that are installed)"
    )
    parser.add_argument(
        "--output", metavar="FOLDER", default="report", help="where the reports go (default: %(default)s)"
    )


class _ShowVersion(argparse._VersionAction):
    """Tells more than a version, on lines that are not wrapped, and only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_given: object) -> None:
        from app.doctor.installation import describe_installation

        print(describe_installation(Settings()))
        parser.exit()


def _add_command(commands: argparse._SubParsersAction[OneLineParser], name: str, text: str) -> OneLineParser:
    """A parser that unknown flags of its command are referred to."""
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(parser=parser)
    return parser


def _add_settings(command: OneLineParser, *settings: tuple[str, str]) -> None:
    """Flags of some settings, and their metavars."""
    for setting, metavar in settings:
        command.add_argument(f"--{setting}", metavar=metavar, default=argparse.SUPPRESS, help="as `djinn serve` has it")


def _doctor(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    from app.doctor.examination import diagnose  # imports PyTorch

    state_dir = None if settings.state_dir is None else settings.state_dir.expanduser()
    weights_dir = settings.engine().weights_dir if arguments.weights else None
    return diagnose(settings.device, state_dir, weights_dir, as_json=arguments.json)


def _back_up(arguments: argparse.Namespace) -> None:
    settings = settings_of(arguments)
    from app.backup import back_up

    if settings.state_dir is None:
        raise FieldOutOfRange("state_dir is none: that server keeps nothing", param="state_dir")
    kv_dir = settings.engine().kv_dir if arguments.with_kv else None
    back_up(settings.state_dir.expanduser(), kv_dir, Path(arguments.folder).expanduser())


def _complete(shell: str) -> None:
    from app.cli import completion

    print(completion(_parser(), shell))


def _new_key() -> None:
    key = new_key()
    print(f"key:    {key}\nsha256: {digest(key.encode())}")


def _models(action: str, name: str) -> None:
    from app.model_store import commands

    cache_dir = Settings().cache_dir.expanduser()
    if action == "pull":
        commands.pull(name, cache_dir)
    elif action == "export":
        commands.export(name, cache_dir)
    else:
        commands.list_models(cache_dir)
