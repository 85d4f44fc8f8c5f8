"""The items of a conversation, as the server keeps them and as answers show them."""

import secrets
from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag
from typing_extensions import TypeAliasType

from app.openai.responses.encoded import NOTHING, Encoded, JsonOf
from app.wire.base import LongList

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
