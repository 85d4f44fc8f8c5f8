"""The items of a response: their texts are encoded once, however long they are."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypeAliasType

from app.domain.values import TokenLogprobs
from app.text.tokenizer import Tokens
from app.wire.base import LongList


@dataclass(frozen=True, slots=True)
class Encoded:
    """The JSON of a value: a tenth of its size as objects. `to_json` copies it into that of the model around it."""

    json: bytes

    @classmethod
    def of(cls, value: Any) -> Encoded:
        """The JSON of `value`. Its integers may have more than 64 bits, as in a client's JSON schema."""
        try:
            return cls(orjson.dumps(value))
        except TypeError:
            return cls(json.dumps(value).encode())


NOTHING = Encoded(b"[]")


class JsonOf:
    """Annotates a field that is `Encoded`: `form` is the type of its value, which the API's document shows."""

    def __init__(self, form: Any) -> None:
        self._form = form

    @cached_property
    def _form_schema(self) -> CoreSchema:
        return TypeAdapter(self._form).core_schema

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        """Takes what is encoded as it is, and encodes what the journal has."""
        copied = core_schema.plain_serializer_function_ser_schema(_fragment)
        return core_schema.no_info_plain_validator_function(_encoded, serialization=copied)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """That of the value."""
        return handler(self._form_schema)


def to_json(model: BaseModel) -> bytes:
    """The JSON of a model that may have encoded parts."""
    return orjson.dumps(model.model_dump())


def _encoded(value: Any) -> Encoded:
    return value if isinstance(value, Encoded) else Encoded.of(value)


def _fragment(encoded: Encoded) -> orjson.Fragment:
    return orjson.Fragment(encoded.json)


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputTextPart(BaseModel):
    """Text that a client has sent."""

    type: Literal["input_text"] = "input_text"
    text: str


class TopLogprob(BaseModel):
    """A token that could stand at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TextLogprob(TopLogprob):
    """The token that stands at a position, and the most likely ones there, best first."""

    top_logprobs: list[TopLogprob]


class OutputTextPart(BaseModel):
    """Text of the model. It has no annotations here."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: Annotated[list[str], Field(max_length=0)] = []
    logprobs: Annotated[Encoded, JsonOf(list[TextLogprob])] = Field(default_factory=lambda: NOTHING)


class RefusedPart(BaseModel):
    """Text in which a model said that it would not answer."""

    type: Literal["refusal"] = "refusal"
    refusal: str

    @property
    def text(self) -> str:
        """The text of the part."""
        return self.refusal


OutputPart = TypeAliasType("OutputPart", Annotated[OutputTextPart | RefusedPart, Field(discriminator="type")])


class InputMessageItem(BaseModel):
    """A message to the model."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer"]
    content: LongList[InputTextPart]
    status: ItemStatus = "completed"


class OutputMessageItem(BaseModel):
    """A message of the model."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: LongList[OutputPart]
    status: ItemStatus = "completed"


class FunctionCallItem(BaseModel):
    """A call of a function. Its result comes with the same `call_id`."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"


class FunctionCallOutputItem(BaseModel):
    """The result of a call."""

    id: str
    type: Literal["function_call_output"] = "function_call_output"
    call_id: str
    output: str | LongList[InputTextPart]
    status: ItemStatus = "completed"


def _form_of(item: object) -> str | None:
    kind, role = (
        (item.get("type"), item.get("role"))
        if isinstance(item, dict)
        else (getattr(item, "type", None), getattr(item, "role", None))
    )
    if kind != "message":
        return kind if isinstance(kind, str) else None
    return "output message" if role == "assistant" else "input message"


Item = TypeAliasType(
    "Item",
    Annotated[
        Annotated[InputMessageItem, Tag("input message")]
        | Annotated[OutputMessageItem, Tag("output message")]
        | Annotated[FunctionCallItem, Tag("function_call")]
        | Annotated[FunctionCallOutputItem, Tag("function_call_output")],
        Discriminator(_form_of),
    ],
)
AnyItem = InputMessageItem | OutputMessageItem | FunctionCallItem | FunctionCallOutputItem
OutputItem = TypeAliasType("OutputItem", Annotated[OutputMessageItem | FunctionCallItem, Field(discriminator="type")])


def without_logprobs(item: AnyItem) -> AnyItem:
    """The item as others go on from it: the log-probabilities stay with the response that they came with."""
    if not isinstance(item, OutputMessageItem):
        return item
    bare = [
        part.model_copy(update={"logprobs": NOTHING}) if isinstance(part, OutputTextPart) else part
        for part in item.content
    ]
    return item.model_copy(update={"content": bare})


IdPrefix = Literal["msg", "fc", "fco"]


def new_id(prefix: IdPrefix) -> str:
    """A fresh id: 128 random bits, so that no client can guess one."""
    return f"{prefix}_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token as JSON: a `TextLogprob`, and a `StreamedLogprob`, which has no bytes."""

    shown: bytes
    streamed: bytes

    @classmethod
    def of(cls, found: TokenLogprobs, tokens: Tokens) -> ScoredToken:
        """The token with its alternatives."""
        top = [_token(tokens, *each) for each in found.top]
        token = _token(tokens, found.token_id, found.logprob)
        shown = orjson.dumps({**token, "top_logprobs": top})
        for each in (token, *top):
            del each["bytes"]
        return cls(shown, orjson.dumps({**token, "top_logprobs": top}))


class ScoredText:
    """Collects those of a text that is still written."""

    def __init__(self) -> None:
        self._shown = bytearray()
        self._streamed = bytearray()

    def take(self, found: Sequence[ScoredToken]) -> orjson.Fragment:
        """The next tokens; returns what the event that brings them tells: a list of `StreamedLogprob`s."""
        for each in found:
            self._shown += (b"," if self._shown else b"") + each.shown
            self._streamed += (b"," if self._streamed else b"") + each.streamed
        return orjson.Fragment(_list(b",".join([each.streamed for each in found])))

    @property
    def streamed(self) -> orjson.Fragment:
        """What the event at the end tells of all of them."""
        return orjson.Fragment(_list(self._streamed))

    @property
    def shown(self) -> Encoded:
        """All of them as the text has them: a list of `TextLogprob`s."""
        return Encoded(_list(self._shown))


def _token(tokens: Tokens, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": tokens.token_text(token_id), "logprob": logprob, "bytes": list(tokens.token_bytes(token_id))}


def _list(entries: bytes | bytearray) -> bytes:
    return b"".join((b"[", entries, b"]"))
