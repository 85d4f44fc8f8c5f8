"""The events of a streamed message, as clients read them."""

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Json
from typing_extensions import TypeAliasType

from app.anthropic.answers import AnswerBlock, MessageHead, MessageUsage, StopReason, TextAnswer
from app.anthropic.errors import MessagesErrorBody


class BegunMessage(MessageHead):
    """An answer before its first block."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: Annotated[list[TextAnswer], Field(max_length=0)]
    stop_reason: None
    stop_sequence: None


class MessageStart(BaseModel):
    """The turn has left the queue. The usage has the tokens of the prompt."""

    type: Literal["message_start"]
    message: BegunMessage


class ContentBlockStart(BaseModel):
    """A block begins: a text without a character, or a call without its input."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class TextDelta(BaseModel):
    """The next text of a block."""

    type: Literal["text_delta"]
    text: str


class InputJsonDelta(BaseModel):
    """The next piece of the JSON text of a call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(BaseModel):
    """A block goes on."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | InputJsonDelta, Discriminator("type")]


class ContentBlockStop(BaseModel):
    """A block is whole."""

    type: Literal["content_block_stop"]
    index: int


class StoppedDelta(BaseModel):
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(BaseModel):
    """The answer has ended. The usage is that of the whole call."""

    type: Literal["message_delta"]
    delta: StoppedDelta
    usage: MessageUsage


class MessageStop(BaseModel):
    """The last event of an answer without an error."""

    type: Literal["message_stop"]


StreamedMessage = TypeAliasType(
    "StreamedMessage",
    Annotated[
        MessageStart
        | ContentBlockStart
        | ContentBlockDelta
        | ContentBlockStop
        | MessageDelta
        | MessageStop
        | MessagesErrorBody,
        Discriminator("type"),
    ],
)
"""The data of one event. An error is the last one."""


class MessageEvent(BaseModel):
    """A server-sent event of a streamed message. `data` is the JSON text of a `StreamedMessage` of the type `event`."""

    event: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    data: Json[StreamedMessage]
