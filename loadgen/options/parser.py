"""The parser of every command."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import NoReturn

from loadgen.options.common import EXIT_UNUSABLE

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
