"""The parser of every command."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from loadgen.options.common import EXIT_UNUSABLE

CLOSE = 0.75
"""How alike an unknown flag and the one that was meant are, of 1."""


class OneLineParser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line, not with its whole usage, and guesses what was meant."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with `EXIT_UNUSABLE`."""
        end = "" if message.endswith("?") else "."
        self.exit(EXIT_UNUSABLE, f"loadgen: {message}{end} See {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End for arguments that this parser has left over."""
        given = unknown[0].partition("=")[0]
        if not given.startswith("-"):
            self.error(f"unexpected {given}")
        close = difflib.get_close_matches(given, self._option_string_actions, n=1, cutoff=CLOSE)
        self.error(f"unknown flag {given}" + (f"; did you mean {close[0]}?" if close else ""))
