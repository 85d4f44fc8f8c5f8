"""The events of a streamed response, as clients read them."""

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Json
from typing_extensions import TypeAliasType

from app.openai.responses.items import OutputItem, OutputTextPart
from app.openai.responses.response import ResponseObject


class NumberedEvent(BaseModel):
    """The field that all events have: they are counted from 0 on."""

    sequence_number: int


class ResponseStatusEvent(NumberedEvent):
    """The response as it is now. The first two events are of this form, and the last."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseObject


class OutputItemEvent(NumberedEvent):
    """An item begins, or is done."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ItemEvent(NumberedEvent):
    """The fields of an event within an item."""

    item_id: str
    output_index: int


class ContentPartEvent(ItemEvent):
    """The text of a message begins, or is done."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputTextPart


class StreamedTopLogprob(BaseModel):
    """A token that could stand at a position."""

    token: str
    logprob: float


class StreamedLogprob(StreamedTopLogprob):
    """The token that stands at a position, and the most likely ones there, best first."""

    top_logprobs: list[StreamedTopLogprob]


class TextDeltaEvent(ItemEvent):
    """The next text of a message."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[StreamedLogprob]


class TextDoneEvent(ItemEvent):
    """The whole text of a message."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[StreamedLogprob]


class ArgumentsDeltaEvent(ItemEvent):
    """The next piece of the JSON text of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(ItemEvent):
    """All arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


StreamedResponse = TypeAliasType(
    "StreamedResponse",
    Annotated[
        ResponseStatusEvent
        | OutputItemEvent
        | ContentPartEvent
        | TextDeltaEvent
        | TextDoneEvent
        | ArgumentsDeltaEvent
        | ArgumentsDoneEvent,
        Discriminator("type"),
    ],
)
"""The data of one event."""


class ResponseEvent(BaseModel):
    """A server-sent event of a streamed response.

    `data` is the JSON text of a `StreamedResponse` of the type `event`.
    """

    event: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    data: Json[StreamedResponse]
