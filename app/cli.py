"""The command line: one function for each command of `djinn`, `serve` first."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from app.bench import bench
from app.demo import demo
from app.domain.errors import DjinnError, FieldOutOfRange
from app.flags import USAGE_ERROR, OneLineParser, add_flags, in_flags, settings_of
from app.logs.formats import configure
from app.machine.descriptors import raise_descriptor_limit
from app.settings import Settings
from app.shell import SHELL_COMMANDS, add_shell_commands, run_shell_command
from app.tenants.keys import digest, new_key
from app.web.errors.field_schema import schema_of
from app.web.errors.problems import describe_problem
from app.web.hangups import Hangups
from app.web.port import bind

SHELLS = ("bash", "zsh", "fish")
"""Those that `djinn completion` writes a script for."""
CONTROLS = ("auto", "ray", "processes")
"""Who may start the replicas of a cluster."""
MOST_REPLICAS = 64
INTERRUPTED = 130
"""What a shell reports of a process that Ctrl-C has ended."""
SPIN_COUNT = "4000"
"""How long PyTorch's OpenMP threads spin at the end of an operator, read when PyTorch is loaded. By default they
spin for milliseconds, which is no faster on an idle machine and ruinous as soon as anything else wants a core."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status. A mistake of the user is a message and status 2."""
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            arguments.parser.refuse(unknown)
        if arguments.command == "serve":
            return _serve(settings_of(arguments))
        if arguments.command == "cluster":
            return _cluster(arguments)
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
    parser = OneLineParser("djinn", description="A server for language-model sessions.")
    parser.add_argument("--version", action=_ShowVersion, help="what is installed, and what it would serve with")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = _add_command(commands, "serve", "load a model and serve it over HTTP")
    serve.epilog = "DJINN_<NAME> sets the same from the environment, for example DJINN_PORT; a flag wins."
    add_flags(serve)
    _add_cluster(_add_command(commands, "cluster", "several servers behind one front door"))
    showing = _add_command(commands, "demo", "serve a model to a dozen agents, and show them in the browser")
    showing.add_argument(
        "--model",
        metavar="MODEL",
        default=Settings.model_fields["model"].default,
        help="as `djinn serve` has it (default: %(default)s)",
    )
    showing.add_argument("--open", action="store_true", help="open the page in the browser")
    _add_bench(_add_command(commands, "bench", "measure Djinn beside the other servers that are installed"))
    add_shell_commands(lambda name, text: _add_command(commands, name, text))
    backup = _add_command(commands, "backup", "copy a state folder, also while a server uses it")
    backup.add_argument("folder", metavar="FOLDER", help="the copy: a folder that is empty, or not there yet")
    backup.add_argument("--with-kv", action="store_true", help="KV files too: turns of the copy compute less again")
    _add_settings(backup, ("state-dir", "FOLDER"))
    doctor = _add_command(commands, "doctor", "examine this machine before anything is measured on it")
    _add_settings(doctor, ("device", "NAME"), ("state-dir", "FOLDER"))
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


def _add_cluster(parser: OneLineParser) -> None:
    actions: argparse._SubParsersAction[OneLineParser] = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True
    )
    serve = _add_command(actions, "serve", "start replicas and a front door before them")
    serve.add_argument("--replicas", type=_count, default=2, metavar="COUNT", help="servers, 1 to 64 (default: 2)")
    serve.add_argument(
        "--prefill-replicas",
        type=int,
        default=0,
        metavar="COUNT",
        help="how many of them only compute long prompts for the others (default: 0, each computes its own)",
    )
    serve.add_argument(
        "--control",
        choices=CONTROLS,
        default="auto",
        metavar=f"{{{','.join(CONTROLS)}}}",
        help="who starts replicas: ray (pip install 'djinn[cluster]'), processes of this one, or auto: ray where it is "
        "installed (default: auto)",
    )
    serve.add_argument(
        "--ray-address", metavar="ADDRESS", help="a cluster of Ray's that runs (default: started on this machine)"
    )
    serve.add_argument(
        "--replica-gpus", type=float, default=0.0, metavar="COUNT", help="GPUs of Ray's for each (default: 0)"
    )
    add_flags(serve)
    front = _add_command(actions, "front", "a front door before replicas that run already")
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


def _cluster(arguments: argparse.Namespace) -> int:
    from app.cluster import command

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
        arguments.replicas,
        arguments.prefill_replicas,
        arguments.control,
        arguments.ray_address,
        arguments.replica_gpus,
    )
    return command.serve(settings, given, plan)


def _serve(settings: Settings) -> int:
    """Returns with what the process should end."""
    settings.require_safe_access()
    with Hangups.heard() as hangups:
        return _serve_until_told(settings, hangups)


def _serve_until_told(settings: Settings, hangups: Hangups) -> int:
    configure(logging.INFO, settings.log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    descriptors = raise_descriptor_limit()
    with bind(settings.host, settings.port) as bound:
        # Imports take seconds: --help and a wrong flag need not wait for them.
        with _no_garbage_collected():
            from app.engine_process.engine import EngineProcess

            process = EngineProcess(settings.engine_timeout_s)  # it imports PyTorch meanwhile
            from app.main import load_app
            from app.web.connections.caps import Caps
            from app.web.server import Server

            application = load_app(settings, process)
        server = Server(application, Caps.of(settings, descriptors), hangups)
        server.run([bound])
    return server.status


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


def _doctor(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    from app.doctor.command import diagnose  # imports PyTorch

    state_dir = None if settings.state_dir is None else settings.state_dir.expanduser()
    return diagnose(settings.device, state_dir, as_json=arguments.json)


def _back_up(arguments: argparse.Namespace) -> None:
    settings = settings_of(arguments)
    from app.backup import back_up

    if settings.state_dir is None:
        raise FieldOutOfRange("state_dir is none: that server keeps nothing", param="state_dir")
    kv_dir = settings.engine().kv_dir if arguments.with_kv else None
    back_up(settings.state_dir.expanduser(), kv_dir, Path(arguments.folder).expanduser())


def _complete(shell: str) -> None:
    from app.completion import completion

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
