"""The bases of request bodies and of answers, bodies about the server itself, and shapes of what is written as JSON and
is never an object here: only the API's document shows those.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Json, Tag, create_model
from typing_extensions import TypeAliasType

from app.domain.errors import FieldOutOfRange

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


def one_of(texts: Iterable[str]) -> Any:
    """One of these texts."""
    return _literal[tuple(texts)]


def fixed(text: str) -> Any:
    """A field that is always `text`, which the document also shows as its default."""
    return text, text


def union_of(name: str, tag: str, *members: Any) -> Any:
    """A component that is one of the `members`, which differ in the field `tag`."""
    kind: Any = Annotated[reduce(or_, members), Discriminator(tag)]
    return TypeAliasType(name, kind)


def event_of(name: str, about: str, data: Any, *names: str, **others: Any) -> Any:
    """A server-sent event of one of the `names`, whose `data` is the JSON text of such a value."""
    return shape(name, about, {**others, "event": one_of(names), "data": _json[data]})


def streamed_events(name: str, about: str, data: str, *members: Any) -> Any:
    """A server-sent event named as the `type` of its `data`, which is the JSON text of one of the `members`. `data` is
    the name of their component.
    """
    names = [each for member in members for each in get_args(member.model_fields["type"].annotation)]
    return event_of(name, about, union_of(data, "type", *members), *names)


def scored_shape(name: str, alternative: Any, fields: Mapping[str, Any]) -> Any:
    """A component that is a token, with its alternatives."""
    about = "The token that stands at a position, and the most likely ones there, best first."
    return shape(name, about, {**fields, "top_logprobs": [alternative]})


def page_shape(name: str, about: str, kind: Any) -> Any:
    """A component that is a page of a list, as OpenAI's API has them."""
    ends = {"first_id": str | None, "last_id": str | None}
    return shape(name, about, {"object": fixed("list"), "data": [kind], "has_more": bool, **ends})


def list_shape(name: str, about: str, kind: Any) -> Any:
    """A component that is a whole list."""
    return shape(name, about, {"data": [kind]})


def deleted_shape(name: str, about: str, kind: str) -> Any:
    """A component that says that something of this `kind` is no more."""
    return shape(name, about, {"id": str, "object": fixed(kind), "deleted": (Literal[True], True)})


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


def is_none(value: object) -> bool:
    """For fields that are left out of the answer when they have no value."""
    return value is None


MAX_COUNT = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
S = TypeVar("S")
T = TypeVar("T")
LongList = Annotated[list[T], Field(fail_fast=True)]
"""A list that a client may make long. Only its first wrong value becomes an error: each costs more than a right one."""
TextOrList = Annotated[
    Annotated[S, Tag("text")] | Annotated[T, Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "text"),
]
"""A text of type `S`, or a list of type `T`. An error is about the form that came."""


def type_of(value: object, field: str = "type") -> str | None:
    """The text in `field` of an object, whether it has been checked or is as a client has sent it."""
    found = value.get(field) if isinstance(value, dict) else getattr(value, field, None)
    return found if isinstance(found, str) else None


def by_tag(field: str, *tags: str, error: str, words: str) -> Discriminator:
    """Tells the members of a union apart by `field`, whose value is the `Tag` of each. `error` and `words` are type and
    message of the error about another value.
    """

    def tag_of(value: object) -> str | None:
        found = type_of(value, field)
        return found if found in tags else None

    return Discriminator(tag_of, custom_error_type=error, custom_error_message=words)


class WireModel(BaseModel):
    """Base of every request body: an unknown field, a wrong type and a NaN are errors, and so is text not in Unicode.

    Pydantic looks into a string, and finds lone surrogates, only if its length has a limit.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, str_min_length=0)


class QueryModel(WireModel):
    """Base of what comes in a query string, where every value is a text."""

    model_config = ConfigDict(strict=False)


class View(BaseModel):
    """Base of answers that show the engine's own objects: it is built from any object that has its fields."""

    model_config = ConfigDict(from_attributes=True)


def check_token_ids(token_ids: Iterable[int], vocab_size: int, *, param: str) -> None:
    """Raise `FieldOutOfRange` unless every id is in the vocabulary."""
    wrong = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
    if wrong is not None:
        raise FieldOutOfRange.at(param, f"token id {wrong} must be at most {vocab_size - 1}")


ErrorDetail = shape(
    "ErrorDetail",
    "What went wrong: `code` is for programs, `message` for people; `param` names the field at fault.",
    {"message": str, "type": str, "code": str, "param": str | None},
)
ErrorBody = shape(
    "ErrorBody", "The body of every error answer, and the data of an `error` event.", {"error": ErrorDetail}
)


class Status(BaseModel):
    """That the server is up."""

    status: Literal["ok", "ready"]


class Version(BaseModel):
    """What runs here. The model computes in `dtype` and its KV is kept as `kv_dtype`. It has `num_layers` layers, a
    residual stream of `hidden_size` numbers, `vocab_size` tokens, and room for `max_model_len` of them in a history.
    `chat`: whether it has a chat template.
    """

    version: str
    model: str
    device: str
    dtype: str
    kv_dtype: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    chat: bool


class MoveBody(WireModel):
    """Where the session is to go."""

    replica: str = Field(min_length=1, max_length=16, description="name of a server of the cluster")


class SettleBody(WireModel):
    """That a server of the cluster will never come back."""

    peer_is_dead: str = Field(
        pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
        description="UUID of the journal of the server that the session was leaving for; no server may use it any more",
    )


class MoveView(BaseModel):
    """Where the session is now, and what came with it."""

    id: str
    replica: str
    url: str = Field(description="where that server is asked")
    tokens: int = Field(description="of its history")
    tokens_with_kv: int = Field(description="of these, from the first one, need not be recomputed")
    bytes: int = Field(description="of its history and KV, as sent")
    seconds: float = Field(description="from the first step of the move to the last")
