"""Options that are the fields of an experiment's plan, which has a full size and a quick one."""

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = TypeVar("P", bound="DataclassInstance")


def add_plan_options(parser: argparse.ArgumentParser, full: P, quick: P, texts: Mapping[str, str]) -> None:
    """An option for each field of whole numbers that `texts` says something of, and `--quick`."""
    for name, text in texts.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, metavar="N", help=with_default(text, full, quick, name))
    parser.add_argument("--quick", action="store_true", help="measure less, in about a minute")


def with_default(text: str, full: P, quick: P, name: str) -> str:
    """What is said of the option of that field, with its defaults."""
    usual, short = (_shown(getattr(plan, name)) for plan in (full, quick))
    return f"{text} (default: {usual}{'' if usual == short else f', with --quick {short}'})"


def read_plan(options: argparse.Namespace, full: P, quick: P) -> P:
    """The full plan, or that of `--quick`, with what was given. Raises `LoadgenError` for what is out of range."""
    names = {field.name for field in fields(full)}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    return replace(quick if options.quick else full, **given)


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


def _shown(value: int | tuple[float, ...]) -> str:
    return ",".join(f"{part:g}" for part in value) if isinstance(value, tuple) else f"{value}"
