"""The items of a response, as its input and its output have them."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypeAliasType

from app.wire.base import LongList, shape, type_of


def encoded(value: Any) -> bytes:
    """The JSON of a value, or of `bytes` that are JSON: a tenth of its size as objects. Its integers may have more than
    64 bits, as in a client's JSON schema.
    """
    if isinstance(value, bytes):
        return value
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()


class JsonOf:
    """Annotates `bytes` that are JSON already, which `to_json` copies into that of the model around them. `form` is the
    type of the value, which the API's document shows.
    """

    def __init__(self, form: Any) -> None:
        self._form = form

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        """Takes what is encoded as it is, and encodes what the journal has."""
        copied = core_schema.plain_serializer_function_ser_schema(orjson.Fragment)
        return core_schema.no_info_plain_validator_function(encoded, serialization=copied)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """That of the value."""
        return handler(TypeAdapter(self._form).core_schema)


def to_json(model: BaseModel) -> bytes:
    """The JSON of a model that may have encoded parts."""
    return orjson.dumps(model.model_dump())


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputTextPart(BaseModel):
    """Text that a client has sent."""

    type: Literal["input_text"] = "input_text"
    text: str


_TOKEN = {"token": str, "logprob": float, "bytes": [int]}
TopLogprob = shape("TopLogprob", "A token that could stand at a position.", _TOKEN)
TextLogprob = shape(
    "TextLogprob",
    "The token that stands at a position, and the most likely ones there, best first.",
    {**_TOKEN, "top_logprobs": [TopLogprob]},
)


class OutputTextPart(BaseModel):
    """Text of the model. It has no annotations here."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: Annotated[list[str], Field(max_length=0)] = []
    logprobs: Annotated[bytes, JsonOf(list[TextLogprob])] = Field(default_factory=lambda: b"[]")


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
    kind = type_of(item)
    if kind != "message":
        return kind
    return "output message" if type_of(item, "role") == "assistant" else "input message"


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
        part.model_copy(update={"logprobs": b"[]"}) if isinstance(part, OutputTextPart) else part
        for part in item.content
    ]
    return item.model_copy(update={"content": bare})


IdPrefix = Literal["msg", "fc", "fco"]


def new_id(prefix: IdPrefix) -> str:
    """A fresh id: 128 random bits, so that no client can guess one."""
    return f"{prefix}_{secrets.token_hex(16)}"
