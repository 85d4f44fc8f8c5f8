"""The parser of every command, and options that are the fields of a plan: see `loadgen.plans.option`."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from loadgen.options.common import EXIT_UNUSABLE
from loadgen.plans import KEY, Option

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


CLOSE = 0.75
"""How alike an unknown flag and the one that was meant are, of 1."""
NOUNS: dict[object, str] = {int: "an integer", float: "a number"}
"""What a flag takes, by the function that reads it."""

NAMES = re.compile(r"^\w+(?= (?:must|has|names|is)\b)|(?<![\w/.-])[a-z]+(?:_[a-z]+)+(?![\w/-])")
"""What may be the name of what a flag sets, but is no part of a path."""


class OneLineParser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line, not with its whole usage, and guesses what was meant."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with `EXIT_UNUSABLE`."""
        end = "" if message.endswith("?") else "."
        self.exit(EXIT_UNUSABLE, f"loadgen: {self._plain(message)}{end} See {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End for arguments that this parser has left over."""
        given = unknown[0].partition("=")[0]
        if not given.startswith("-"):
            self.error(f"unexpected {given}")
        close = difflib.get_close_matches(given, self._option_string_actions, n=1, cutoff=CLOSE)
        self.error(f"unknown flag {given}" + (f"; did you mean {close[0]}?" if close else ""))

    def in_flags(self, message: str) -> str:
        """The message of an error, with flags instead of the names of what they set. A name that is a word of the
        language too becomes a flag only where the message begins with it.
        """
        flags = {action.dest: action.option_strings[0] for action in self._actions if action.option_strings}
        return NAMES.sub(lambda found: flags.get(found[0], found[0]), message)

    def _plain(self, message: str) -> str:
        """What argparse says, in words that name the flag and what it takes."""
        if missing := re.fullmatch(r"the following arguments are required: (.+)", message):
            return f"missing {missing[1]}{self._choices(missing[1])}"
        if not (found := re.fullmatch(r"argument ([^:]+): (.+)", message, re.DOTALL)):
            return message
        name, problem = found[1].partition("/")[0], found[2]
        if problem == "expected one argument":
            return f"{name} takes {self._value(name)}"
        if wrong := re.fullmatch(r"invalid \w+ value: (.+)", problem):
            return f"{name} takes {self._value(name)}, not {wrong[1]}"
        if wrong := re.fullmatch(r"invalid choice: (\S+) \(.+\)", problem):
            return f"unknown {name} {wrong[1]}{self._choices(name)}"
        if problem.startswith("ignored explicit argument"):
            return f"{name} takes no value"
        return f"{name}: {problem}"

    def _value(self, name: str) -> str:
        """What the value of a flag is."""
        action = self._option_string_actions[name]
        return NOUNS.get(action.type) or f"a value: {action.metavar or action.dest}"

    def _choices(self, name: str) -> str:
        """The words that may stand for a positional, if there are only some."""
        action = next((action for action in self._actions if name in (action.metavar, action.dest)), None)
        return f": {', '.join(map(str, action.choices))}" if action and action.choices else ""


P = TypeVar("P", bound="DataclassInstance")


def add_plan_options(
    parser: argparse.ArgumentParser, kind: type[DataclassInstance], *, but: Collection[str] = ()
) -> None:
    """An option for each field of the plan that has one, and `--quick` if some have another value with it.

    What is not given is None.
    """
    found = [(field, option) for field, option in _options(kind) if field.name not in but]
    for field, option in found:
        usual = field.default
        if field.type in (bool, "bool"):
            parser.add_argument(
                _flag(field, option), dest=field.name, action="store_true", default=None, help=option.text
            )
            continue
        parser.add_argument(
            _flag(field, option),
            dest=field.name,
            type=option.read or _reader(usual),
            metavar=option.form or _form(usual),
            help=f"{option.text}{_told(usual, option.quick)}",
        )
    if any(option.quick is not MISSING for _, option in found):
        parser.add_argument("--quick", action="store_true", help="measure less, in about a minute")


def read_plan(options: argparse.Namespace, kind: type[P], **more: Any) -> P:
    """The plan with what was given, or the values of `--quick`, or the defaults; `more` are values from elsewhere,
    unless they were given. Raises `LoadgenError` for what is out of range.
    """
    quick = getattr(options, "quick", False)
    short = {field.name: option.quick for field, option in _options(kind) if quick and option.quick is not MISSING}
    return kind(**{**more, **short, **given(options, kind)})


def given(options: argparse.Namespace, kind: type[DataclassInstance]) -> dict[str, Any]:
    """Fields of the plan that the command line has set, by name."""
    names = [field.name for field, _ in _options(kind)]
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def flags(kind: type[DataclassInstance]) -> dict[str, str]:
    """The flag of each field that has one."""
    return {field.name: _flag(field, option) for field, option in _options(kind)}


def integers(text: str) -> tuple[int, ...]:
    """Such as `256,512`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between them, not {text!r}") from None


def _options(kind: type[DataclassInstance]) -> Iterator[tuple[Field[Any], Option]]:
    return ((field, field.metadata[KEY]) for field in fields(kind) if KEY in field.metadata)


def _flag(field: Field[Any], option: Option) -> str:
    return option.flag or f"--{field.name.replace('_', '-')}"


def _reader(usual: object) -> Callable[[str], Any]:
    if isinstance(usual, tuple):
        return integers
    return type(usual) if isinstance(usual, int | float | Enum) else float


def _form(usual: object) -> str:
    return "N,N,..." if isinstance(usual, tuple) else "|".join(type(usual)) if isinstance(usual, Enum) else "N"


def _told(usual: object, quick: object) -> str:
    if usual is None or usual is MISSING or usual == ():
        return ""
    return f" (default: {_shown(usual)}{'' if quick in (MISSING, usual) else f', with --quick {_shown(quick)}'})"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else f"{value}"
