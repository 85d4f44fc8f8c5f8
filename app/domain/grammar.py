"""The form that a client asks of a turn's text. No third-party imports."""

from dataclasses import dataclass, field
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
    field: str = field(compare=False)
    """The request's field that it came in, for errors."""
