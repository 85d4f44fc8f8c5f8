"""Tables of the options of a parser."""

import argparse
from collections.abc import Iterable

from docs.site.markdown import table


def options_table(actions: Iterable[argparse.Action]) -> str:
    """A row for each option: its flags, its value and its help. `--help` itself is left out."""
    return table(("flag", "value", "meaning"), [_row(action) for action in actions if action.dest != "help"])


def _row(action: argparse.Action) -> tuple[str, str, str]:
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
    values = action.metavar or "|".join(map(str, action.choices or ()))
    return flags, f"`{values}`" if values else "", (action.help or "").replace("%%", "%")
