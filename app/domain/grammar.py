"""The form that a client asks of a turn's text. No third-party imports."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum


class GrammarKind(StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"
    """A JSON list of strings, of which the text is one."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole text of a turn must match. Two with one kind and text are equal, whatever field they came in."""

    kind: GrammarKind
    text: str
    field: str = dataclasses.field(compare=False)
    """The request's field that it came in, for errors."""
    parts: tuple[tuple[str, Grammar], ...] = dataclasses.field(default=(), compare=False, repr=False)
    """Grammars that it was made from, each with its name: an error tells of the part that is wrong."""
