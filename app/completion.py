"""Completion of `djinn` in a shell, as a script that the shell reads once."""

import argparse
from collections.abc import Iterator

import shtab

from app.model_store.catalog import CATALOG

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
