"""The chunks of streamed answers, and the server-sent events that bring them, as clients read them."""

from typing import Any, Literal

from pydantic import BaseModel, Field, Json

from app.openai.chat import ChatLogprobs
from app.openai.completions import CompletionLogprobs
from app.openai.fields import Usage
from app.wire.base import ErrorBody


class ChunkHead(BaseModel):
    """The fields that open every chunk. `usage` is there if `stream_options` ask for it."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None


class FunctionDelta(BaseModel):
    """What comes next of a call: first the name, then the text of the arguments, piece by piece."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """What comes next of the call with that index; `id` and `type` come first."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    """What comes next in a message; `role` comes first, by itself. A field that brings nothing is absent."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """The next piece of one answer; the last has a `finish_reason`."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(ChunkHead):
    """A piece of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionChunkChoice(BaseModel):
    """The next piece of one continuation; the last has a `finish_reason`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None


class CompletionChunk(ChunkHead):
    """A piece of streamed continuations."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


def _allow_done(schema: dict[str, Any]) -> None:
    """`[DONE]` is no JSON, so the text as a whole has no media type."""
    schema.pop("contentMediaType")


class ChatCompletionEvent(BaseModel):
    """A server-sent event of a streamed chat. `data` is the JSON text of a `ChatCompletionChunk`; after an error, that
    of an `ErrorBody`; in the last event of a stream without an error `[DONE]`.
    """

    data: Json[ChatCompletionChunk | ErrorBody] = Field(json_schema_extra=_allow_done)


class CompletionEvent(BaseModel):
    """A server-sent event of streamed continuations. `data` is the JSON text of a `CompletionChunk`; after an error,
    that of an `ErrorBody`; in the last event of a stream without an error `[DONE]`.
    """

    data: Json[CompletionChunk | ErrorBody] = Field(json_schema_extra=_allow_done)
