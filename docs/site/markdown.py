"""Markdown that is written by programs."""

import re
from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a bar or a line's end in a cell stays within the cell. Code needs no escape."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return re.sub(r"`[^`]*`|\|", lambda part: "\\|" if part[0] == "|" else part[0], " ".join(text.split()))
