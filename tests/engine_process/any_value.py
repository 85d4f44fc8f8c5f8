"""Any value of a type, from its annotations: what the server and the engine may send each other."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from app.domain.errors import ContextTooLong, DjinnError, FieldOutOfRange, SessionLimit

NUMBERS = st.integers(-(2**31), 2**31)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: NUMBERS,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    Path: st.text("abc/.", min_size=1, max_size=8).map(Path),
    type(None): st.none(),
    DjinnError: st.sampled_from(
        [
            FieldOutOfRange("too large", param="layers"),
            SessionLimit("no more", retry_after_s=60),
            ContextTooLong("ü"),
        ]
    ),
}
DEPTH = 2


def any_value(kind: Any) -> st.SearchStrategy[Any]:
    """Values of `kind`; types that contain themselves end after a few levels."""
    return _any_value(kind, 0)


@functools.cache
def _any_value(kind: Any, depth: int) -> st.SearchStrategy[Any]:
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, typing.NewType):
        return _any_value(kind.__supertype__, depth)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{each.name: _any_value(hints[each.name], depth) for each in dataclasses.fields(kind)})
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: _any_value(each, depth) for name, each in hints.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(_any_value(each, depth) for each in arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is not ...:
        return st.tuples(*(_any_value(each, depth) for each in arguments))
    if depth >= DEPTH:
        return st.just({} if origin is Mapping else origin(()))
    if origin is tuple:
        return st.lists(_any_value(arguments[0], depth + 1), max_size=3).map(tuple)
    if origin is frozenset:
        return st.frozensets(_any_value(arguments[0], depth + 1), max_size=3)
    assert origin is Mapping, kind
    return st.dictionaries(*(_any_value(each, depth + 1) for each in arguments), max_size=3)
