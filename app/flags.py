"""The flags of `djinn serve`: one for each setting."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, get_args, get_origin

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from app.domain.values import KVBudget
from app.settings import Settings

USAGE_ERROR = 2
CLOSE = 0.75
"""How alike an unknown flag and the one that was meant are, of 1."""
ALIASES: dict[str, tuple[str, ...]] = {"api_keys": ("--api-key",), "cors_origins": ("--cors-origin",), "lora": ()}
"""Flags that can be given once for each of several values."""
SEVERAL = {"served_model_name"}
"""Flags that take several values at once."""
METAVARS = {
    "host": "ADDRESS",
    "port": "PORT",
    "api_keys": "KEY[,KEY...]",
    "otlp_endpoint": "URL",
    "replica": "NAME",
    "cluster": "STORE",
    "advertise": "URL",
    "allowed_hosts": "NAME[,NAME...]",
    "cors_origins": "ORIGIN[,ORIGIN...]",
    "model": "MODEL",
    "served_model_name": "NAME",
    "lora": "NAME=FOLDER",
    "device": "DEVICE",
    "seed": "NUMBER",
    "block_size": "TOKENS",
    "max_model_len": "TOKENS",
}
"""What `--help` calls the value of a setting, where neither the end of its name nor its type tells."""
OF_NAMES = {"_dir": "FOLDER", "_tokens": "TOKENS", "chat_format": "FORMAT"}
OF_TYPES = {Path: "FILE", ByteSize: "SIZE", KVBudget: "SIZE", float: "SECONDS", int: "COUNT"}
MAIN = (
    "host",
    "port",
    "api_keys",
    "tenants",
    "model",
    "served_model_name",
    "lora",
    "device",
    "dtype",
    "weights_device",
    "kv_device",
    "kv_host",
    "kv_disk",
    "max_model_len",
    "state_dir",
)
"""The settings that most servers need: those that `--help` shows."""
GROUPS = {
    "host": "access and logs",
    "model": "the model",
    "batch_invariant": "computation",
    "weights_device": "memory",
    "max_step_tokens": "sessions and turns",
    "max_connections": "connections, requests and files",
    "park_on_tool_calls": "OpenAI's and Anthropic's routes",
    "engine_timeout_s": "failures and shutdown",
}
"""The first setting of each part of `--help`, in the order of the settings, and what the part is about."""

NAMES = re.compile(rf"(?<![\w./-])(?:{'|'.join(name for name in Settings.model_fields if '_' in name)})(?![\w/-])")
"""The names of settings that are no words of the language, but not in a path."""


class OneLineParser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line, not with its whole usage, and guesses what was meant."""

    main: Sequence[str] = ()
    """What `--help` shows, where `--help-all` shows the rest too; none: all."""

    def format_help(self) -> str:
        """What `--help` prints."""
        hidden = [each for each in self._actions if self.main and each.dest not in (*self.main, "help", "help_all")]
        shown = [each.help for each in hidden]
        for each in hidden:
            each.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for each, text in zip(hidden, shown, strict=True):
                each.help = text

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with status 2."""
        end = "" if message.endswith("?") else "."
        flag = "--help-all" if self.main else "--help"
        self.exit(USAGE_ERROR, f"djinn: {self._plain(message)}{end} See {self.prog} {flag}\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End for arguments that this parser has left over."""
        given = unknown[0].partition("=")[0]
        if not given.startswith("-"):
            self.error(f"unexpected {given}")
        close = difflib.get_close_matches(given, self._option_string_actions, n=1, cutoff=CLOSE)
        self.error(f"unknown flag {given}" + (f"; did you mean {close[0]}?" if close else ""))

    def _plain(self, message: str) -> str:
        """What argparse says, in words that name the flag and what it takes."""
        if missing := re.fullmatch(r"the following arguments are required: (.+)", message):
            return f"missing {missing[1]}{self._choices(missing[1])}"
        if not (found := re.fullmatch(r"argument ([^:]+): (.+)", message, re.DOTALL)):
            return message
        name, problem = found[1].partition("/")[0], found[2]
        if problem in ("expected one argument", "expected at least one argument"):
            return f"{name} takes a value: {self._option_string_actions[name].metavar}"
        if wrong := re.fullmatch(r"invalid choice: (\S+) \(.+\)", problem):
            return f"unknown {name} {wrong[1]}{self._choices(name)}"
        if problem.startswith("ignored explicit argument"):
            return f"{name} takes no value"
        return f"{name}: {problem}"

    def _choices(self, name: str) -> str:
        """The words that may stand for an argument, if there are only some."""
        action = next(
            (action for action in self._actions if name in (action.metavar, action.dest, *action.option_strings)), None
        )
        return f": {', '.join(map(str, action.choices))}" if action and action.choices else ""


Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"
Run = Callable[[argparse.Namespace], int | None]
"""Does what a command line says; returns the exit status, None for 0."""


def add_command(commands: Commands, name: str, text: str, run: Run | None = None) -> OneLineParser:
    """A parser that unknown flags of its command are referred to. None: `run` is that of the command that it is in."""
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(parser=parser, **({} if run is None else {"run": run}))
    return parser


class _ShowAll(argparse.Action):
    """Prints what the parser knows, and leaves."""

    def __call__(self, parser: argparse.ArgumentParser, *_given: object) -> None:
        assert isinstance(parser, OneLineParser)
        parser.main = ()
        parser.print_help()
        parser.exit()


def add_flags(parser: OneLineParser) -> None:
    """Give the parser a flag for each setting. What is not given is not in the namespace."""
    parser.main = MAIN
    parser.add_argument("--help-all", action=_ShowAll, nargs=0, default=argparse.SUPPRESS, help="show all flags")
    group: argparse._ActionsContainer = parser
    for name, field in Settings.model_fields.items():
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        flags = (flag_of(name), *ALIASES.get(name, ()))
        text = f"{field.description}{_default(field)}".replace("%", "%%")
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        if bool in (field.annotation, *get_args(field.annotation)):
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(field.annotation) is Literal:
            options["metavar"] = f"{{{','.join(get_args(field.annotation))}}}"
        else:
            types = (field.annotation, *get_args(field.annotation))
            named = (word for end, word in OF_NAMES.items() if name.endswith(end))
            of_types = (word for each, word in OF_TYPES.items() if each in types)
            options["metavar"] = METAVARS.get(name) or next(chain(named, of_types))
        if name in ALIASES:
            options["action"] = "append"
        if name in SEVERAL:
            options |= {"action": "extend", "nargs": "+"}
        group.add_argument(*flags, **options)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that the flags and the environment give. Raises pydantic's `ValidationError`."""
    given = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    given |= {name: ",".join(given[name]) for name in (ALIASES.keys() | SEVERAL) & given.keys()}
    return Settings(**given)


READY = re.compile(r"Djinn serves .+ on (http://\S+)")
"""What `djinn serve` prints when it takes requests, with its URL."""


def child_command(*arguments: str) -> list[str]:
    """The `djinn` of these arguments, which the kernel ends with this process where it can: on Linux."""
    with_parent = ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()
    return [*with_parent, sys.executable, "-P", "-m", "app", *arguments]  # -P: the working folder may have an `app`


def flag_of(setting: str) -> str:
    """Its flag."""
    return f"--{setting.replace('_', '-')}"


def in_flags(message: str, *, about: str | None) -> str:
    """The message of an error, with flags instead of the names of settings. A name that is a word of the language too
    becomes a flag only at the start, where the error is about that setting.
    """
    if about in Settings.model_fields and re.match(rf"{about}\b", message):
        message = flag_of(about) + message[len(about) :]
    return NAMES.sub(lambda found: flag_of(found[0]), message)


def _default(field: FieldInfo) -> str:
    """What the setting is if nothing is said, unless its description tells."""
    default = field.default
    if "(default: " in (field.description or ""):
        return ""
    match default:
        case None:
            shown = "auto"
        case ():
            shown = "none"
        case bool():
            shown = "yes" if default else "no"
        case ByteSize():
            shown = default.human_readable().replace(".0", "")
        case float():
            shown = f"{default:g}"
        case _:
            shown = str(default)
    return f" (default: {shown})"
