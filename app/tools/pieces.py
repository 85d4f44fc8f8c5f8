"""What an answer is read into, and what every reader of answers does."""

import json
import secrets
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from app.tools.formats import ToolFormat

_ID_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call begins; `index` counts the calls of the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which together are the text of a JSON object."""

    index: int
    text: str


Piece = Content | CallBegun | CallArguments


class AnswerReader(Protocol):
    """Reads one answer as it comes. Text that is no call that can be read is content, so that nothing is lost.

    No text makes it raise, and each character costs the same, however long the answer is.
    """

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether there are calls, and the arguments of each are a JSON object to its end."""
        ...

    def push(self, text: str) -> Iterator[Piece]:
        """Take the next text."""
        ...

    def finish(self) -> Iterator[Piece]:
        """What is left when no more text comes."""
        ...


class CallsOnly:
    """Reads an answer whose grammar allows nothing but calls: if it is cut, its end is markup and no content."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader

    @property
    def calls(self) -> int:
        return self._reader.calls

    @property
    def is_whole(self) -> bool:
        return self._reader.is_whole

    def push(self, text: str) -> Iterator[Piece]:
        return _without_content(self._reader.push(text))

    def finish(self) -> Iterator[Piece]:
        return _without_content(self._reader.finish())


def _without_content(pieces: Iterator[Piece]) -> Iterator[Piece]:
    return (piece for piece in pieces if not isinstance(piece, Content))


class Speech:
    """The content of an answer without white space around calls, where it says nothing."""

    def __init__(self) -> None:
        self._space: list[str] = []

    def say(self, text: str) -> Iterator[Content]:
        """The next content, up to white space at its end."""
        said = text.rstrip()
        if said:
            yield Content("".join([*self._space, said]))
            self._space.clear()
        self._space.append(text[len(said) :])

    def drop_space(self) -> None:
        """A call comes next."""
        self._space.clear()

    def finish(self) -> Iterator[Content]:
        """The white space at the end of an answer without calls."""
        if space := "".join(self._space):
            yield Content(space)


def new_call_id(form: ToolFormat) -> str:
    """An id that templates of the family take."""
    letters = "".join(secrets.choice(_ID_ALPHABET) for _ in range(form.id_characters))
    return form.id_prefix + letters


def read_calls(found: object) -> list[tuple[str, str]] | None:
    """Names and arguments, as texts of JSON, of one call or a list of them; None if it is something else."""
    calls = []
    for each in found if isinstance(found, list) else [found]:
        call: Any = each.get("function", each) if isinstance(each, dict) else {}
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or not is_name(name):
            return None
        calls.append((str(name), json.dumps(arguments)))
    return calls


def is_name(name: object) -> bool:
    """Whether it can be told as the name of a tool: half of a surrogate pair cannot."""
    return isinstance(name, str) and name.isprintable()


def is_object(text: str) -> bool:
    """Whether the text is a JSON object."""
    return isinstance(load_json(text), dict)


def load_json(text: str) -> object:
    """The value that a model wrote, None if it is none: any text may come."""
    try:
        value: object = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value
