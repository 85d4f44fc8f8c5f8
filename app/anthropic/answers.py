"""The answers of `/v1/messages`, whole."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_core import from_json
from typing_extensions import TypeAliasType

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
Event = dict[str, Any]
"""One event of a stream; `type` is its name."""


class TextAnswer(BaseModel):
    """What the model says."""

    type: Literal["text"] = "text"
    text: str


class ToolUseAnswer(BaseModel):
    """A call that the client is to make; it sends the result in a block with this id."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TypeAliasType("AnswerBlock", Annotated[TextAnswer | ToolUseAnswer, Field(discriminator="type")])


class MessageUsage(BaseModel):
    """Tokens of one call. The prompt is the sum of the three kinds of input."""

    input_tokens: int = Field(description="tokens of the prompt whose KV was computed")
    cache_creation_input_tokens: int = Field(0, description="always 0: all KV stays, and none costs more")
    cache_read_input_tokens: int = Field(description="tokens of the prompt whose KV was there")
    output_tokens: int

    @classmethod
    def of(cls, *, prompt: int, cached: int, generated: int) -> "MessageUsage":
        """Of a prompt of so many tokens, `cached` of which had their KV already."""
        return cls(input_tokens=prompt - cached, cache_read_input_tokens=cached, output_tokens=generated)


class MessageHead(BaseModel):
    """The fields that an answer has from its beginning."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    usage: MessageUsage


class MessageAnswer(MessageHead):
    """The model's answer. `stop_sequence` is the one of the call's that ended it."""

    content: list[AnswerBlock]
    stop_reason: StopReason
    stop_sequence: str | None


class TokenCount(BaseModel):
    """The tokens of a prompt."""

    input_tokens: int


def whole_message(events: Iterable[Event]) -> MessageAnswer:
    """Put an answer together from the events that a stream of it has."""
    message: Event = {}
    texts: list[list[str]] = []
    for event in events:
        match event["type"]:
            case "message_start":
                message = {**event["message"], "content": []}
            case "content_block_start":
                message["content"].append(event["content_block"])
                texts.append([])
            case "content_block_delta":
                delta = event["delta"]
                texts[-1].append(delta["text"] if delta["type"] == "text_delta" else delta["partial_json"])
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    for block, pieces in zip(message["content"], texts, strict=True):
        if block["type"] == "text":
            block["text"] = "".join(pieces)
        else:
            block["input"] = _input("".join(pieces))
    return MessageAnswer(**message)


def _input(text: str) -> dict[str, Any]:
    """A call's arguments; of those that the end of the answer cut off, what came before it."""
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
