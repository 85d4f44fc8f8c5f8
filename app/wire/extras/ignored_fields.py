"""Which fields of a call change nothing: each is named in the answer, or the call is refused."""

import re
from collections.abc import Iterable, Iterator

from app.domain.errors import FieldOutOfRange
from app.wire.extras.body import OpenBody
from app.wire.extras.unsupported import ANTHROPIC, NOTHING_KNOWN, RESPONSES, UNSUPPORTED, asks_for

MAX_NAMED = 20
LONGEST_NAME = 64
OTHER = "other"
_LABELS = frozenset(
    f"{place.removeprefix(ANTHROPIC).removeprefix(RESPONSES)}.{name}".removeprefix(".")
    for place, fields in UNSUPPORTED.items()
    for name in fields
)
_INDEX = re.compile(r"\.\d+(?=\.)")
_UNSAFE = re.compile(r"[^!-+\--~]")
"""Everything but printable ASCII without spaces and commas."""


class IgnoredFields:
    """The fields of one call that change nothing. With `strict`, the first of them is an error."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._paths: list[str] = []
        self._has_more = False

    def read(self, body: OpenBody) -> None:
        """Take the fields of `body` that have no effect.

        Raises `FieldOutOfRange` for one that is known and cannot be honoured.
        """
        for place, path, each in _objects(body, body.place, ""):
            extras = each.model_extra or {}
            _refuse_unsupported(place, path, extras)
            if not each.reads_extras:
                self.add(path + name for name, value in extras.items() if asks_for(place, name, value))
            self.add(path + name for name in each.without_effect())

    def add(self, paths: Iterable[str]) -> None:
        """Take fields by their dotted paths, no more of them than are named. Raises `FieldOutOfRange` if strict."""
        for path in paths:
            if self._strict:
                raise FieldOutOfRange(f"{path}: unknown or without effect, and the server is strict", param=path)
            if len(self._paths) == MAX_NAMED:
                self._has_more = True
                return
            self._paths.append(path)

    @property
    def header(self) -> str:
        """The value of the answer's header; empty if there is nothing to name."""
        named = [_UNSAFE.sub("?", path[:LONGEST_NAME]) or "?" for path in self._paths]
        return ", ".join([*named, "..."] if self._has_more else named)

    def labels(self) -> Iterator[str]:
        """A label for each named field: its path without indices if it is a known one, else `OTHER`."""
        for path in self._paths:
            name = _INDEX.sub("", path)
            yield name if name in _LABELS else OTHER


def _objects(body: OpenBody, place: str, path: str) -> Iterator[tuple[str, str, OpenBody]]:
    """`body` and the objects in it, each with its place, and its path up to the names of its fields."""
    yield place, path, body
    for name in type(body).model_fields:
        value = getattr(body, name)
        inner = f"{place}.{name}".removeprefix(".")
        if isinstance(value, OpenBody):
            yield from _objects(value, inner, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], OpenBody):
            for index, item in enumerate(value):
                yield from _objects(item, inner, f"{path}{name}.{index}.")


def _refuse_unsupported(place: str, path: str, extras: dict[str, object]) -> None:
    if not extras:
        return
    for name, field in UNSUPPORTED.get(place, NOTHING_KNOWN).items():
        if field.reason is not None and name in extras and field.asks_for(extras[name]):
            raise FieldOutOfRange(f"{path}{name}: {field.reason}", param=f"{path}{name}")
