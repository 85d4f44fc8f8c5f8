"""Options that are the fields of a plan: see `loadgen.plans.option`."""

import argparse
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from loadgen.plans import KEY, Option

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = TypeVar("P", bound="DataclassInstance")


def add_plan_options(
    parser: argparse.ArgumentParser, kind: type["DataclassInstance"], *, but: Collection[str] = (), **defaults: Any
) -> None:
    """An option for each field of the plan that has one, and `--quick` if some have another value with it.

    `defaults` are those of fields that this command has other ones of. What is not given is None.
    """
    found = [(field, option) for field, option in _options(kind) if field.name not in but]
    for field, option in found:
        usual = defaults.get(field.name, field.default)
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


def given(options: argparse.Namespace, kind: type["DataclassInstance"]) -> dict[str, Any]:
    """Fields of the plan that the command line has set, by name."""
    names = [field.name for field, _ in _options(kind)]
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def flags(kind: type["DataclassInstance"]) -> dict[str, str]:
    """The flag of each field that has one."""
    return {field.name: _flag(field, option) for field, option in _options(kind)}


def integers(text: str) -> tuple[int, ...]:
    """Such as `256,512`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between them, not {text!r}") from None


def numbers(text: str) -> tuple[float, ...]:
    """Such as `2.5,50`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, not {text!r}") from None


def _options(kind: type["DataclassInstance"]) -> Iterator[tuple["Field[Any]", Option]]:
    return ((field, field.metadata[KEY]) for field in fields(kind) if KEY in field.metadata)


def _flag(field: "Field[Any]", option: Option) -> str:
    return option.flag or f"--{field.name.replace('_', '-')}"


def _reader(usual: object) -> Callable[[str], Any]:
    if isinstance(usual, tuple):
        return numbers if any(isinstance(part, float) for part in usual) else integers
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
