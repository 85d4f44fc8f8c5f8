"""Shapes of what is written as JSON and is never an object here: only the API's document shows them."""

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Json, create_model
from typing_extensions import TypeAliasType

_create: Any = create_model
_list: Any = list
_literal: Any = Literal
_json: Any = Json


def shape(name: str, about: str, fields: Mapping[str, Any]) -> Any:
    """A component of the document. Each of the `fields` is a type, `[type]` for a list, a text that it always is, or a
    type with its default.
    """
    return _create(name, __doc__=about, **{key: _field(each) for key, each in fields.items()})


def _field(described: Any) -> Any:
    kind, default = described if isinstance(described, tuple) else (described, ...)
    return (_literal[kind] if isinstance(kind, str) else list_of(*kind) if isinstance(kind, list) else kind), default


def list_of(kind: Any) -> Any:
    """A list of values of this shape, where `[kind]` alone does not do."""
    return _list[kind]


def fixed(text: str) -> Any:
    """A field that is always `text`, which the document also shows as its default."""
    return text, text


def union_of(name: str, tag: str, *members: Any) -> Any:
    """A component that is one of the `members`, which differ in the field `tag`."""
    kind: Any = Annotated[reduce(or_, members), Discriminator(tag)]
    return TypeAliasType(name, kind)


def event_of(name: str, about: str, data: Any, *names: str, **others: Any) -> Any:
    """A server-sent event of one of the `names`, whose `data` is the JSON text of such a value."""
    return shape(name, about, {**others, "event": _literal[names], "data": _json[data]})


def any_event(name: str, *rows: tuple[str, str, str, type[BaseModel]], **others: Any) -> Any:
    """A server-sent event of one of several kinds. Each row has an event's name, its component, what it tells, and the
    model whose JSON text its `data` is.
    """
    members = []
    for called, component, about, data in rows:
        article = "an" if data.__name__[0] in "AEIO" else "a"
        told = f"{about} `data` is the JSON text of {article} `{data.__name__}`."
        members.append(event_of(component, told, data, called, **others))
    return union_of(name, "event", *members)


def chunk_event(name: str, about: str, data: Any) -> Any:
    """A server-sent event without a name, in a stream that ends with `[DONE]`."""
    return shape(name, about, {"data": (_json[data], Field(json_schema_extra=_allow_done))})


def _allow_done(schema: dict[str, Any]) -> None:
    """`[DONE]` is no JSON, so the text as a whole has no media type."""
    schema.pop("contentMediaType")
