"""The answers of `/v1/messages`, whole and streamed."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Discriminator, Field, Json
from pydantic_core import from_json
from typing_extensions import TypeAliasType

from app.anthropic.messages import ID_PREFIX
from app.domain.values import FinishReason
from app.messages import Started, TurnFinished
from app.text.generation import TextChunk, TextItem
from app.tools.reader import AnswerReader, CallArguments, CallBegun, Content, Piece
from app.web.errors import messages_error_body, visible_error
from app.web.sse import sse_event

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


class MessageWriter:
    """Writes the events of one answer. Whole and streamed answers are made of the same events.

    The first event waits for the turn to leave the queue: it tells how much of the prompt had its KV already.
    """

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        *,
        reader: AnswerReader | None,
        on_calls: Callable[[Sequence[str]], None],
    ) -> None:
        """`reader` finds the calls of the answer; None: there are no tools, and all of the answer is text.

        `on_calls` is told the tools that the answer has called, before its last events.
        """
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens
        self._reader = reader
        self._on_calls = on_calls
        self._has_begun = False
        self._blocks = 0
        self._open: str | None = None
        """Type of the block that is open."""
        self._stop_sequence: str | None = None
        self._called: list[str] = []

    def events(self, item: TextItem) -> Iterator[Event]:
        """What the turn's next item gives."""
        if not self._has_begun:
            self._has_begun = True
            yield self._start(item.cached_tokens if isinstance(item, Started) else 0)
        if isinstance(item, TextChunk):
            self._stop_sequence = item.stop
            yield from self._deltas(self._reader.push(item.text) if self._reader else [Content(item.text)])
        elif isinstance(item, TurnFinished):
            yield from self._end(item)

    def _start(self, cached: int) -> Event:
        usage = MessageUsage.of(prompt=self._prompt_tokens, cached=cached, generated=0).model_dump()
        message: Event = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return {"type": "message_start", "message": message}

    def _deltas(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        for piece in pieces:
            match piece:
                case Content() if piece.text:
                    if self._open != "text":
                        yield from self._open_block({"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": piece.text})
                case CallBegun():
                    self._called.append(piece.name)
                    call_id = ID_PREFIX + piece.id.rpartition("_")[2]
                    yield from self._open_block({"type": "tool_use", "id": call_id, "name": piece.name, "input": {}})
                case CallArguments():
                    yield self._delta({"type": "input_json_delta", "partial_json": piece.text})

    def _open_block(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close_block()
        self._open = block["type"]
        self._blocks += 1
        yield {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}

    def _close_block(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._blocks - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _end(self, finished: TurnFinished) -> Iterator[Event]:
        left = list(self._deltas(self._reader.finish())) if self._reader else []
        reason = self._stop_reason(finished)
        if reason == "tool_use":
            self._on_calls(self._called)
        yield from left
        yield from self._close_block()
        cost = finished.usage
        usage = MessageUsage.of(
            prompt=cost.prompt_tokens, cached=cost.cached_tokens, generated=cost.completion_tokens
        ).model_dump()
        stopped = {"stop_reason": reason, "stop_sequence": self._stop_sequence}
        yield {"type": "message_delta", "delta": stopped, "usage": usage}
        yield {"type": "message_stop"}

    def _stop_reason(self, finished: TurnFinished) -> StopReason:
        """A call that the end of the answer may have cut off is not to be made."""
        if finished.reason is FinishReason.LENGTH:
            return "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._reader is not None and self._reader.is_whole else "end_turn"


Items = AsyncIterator[tuple[int, TextItem]]
"""The items of the call's only choice, each with that choice's index."""


async def stream(items: Items, writer: MessageWriter, request_id: str) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a streamed answer. An error after the stream has begun is an event too, the last."""
    try:
        async for _, item in items:
            for event in writer.events(item):
                yield sse_event(event["type"], orjson.dumps(event))
    except Exception as error:
        yield sse_event("error", messages_error_body(visible_error(error), request_id))


async def collect(items: Items, writer: MessageWriter) -> MessageAnswer:
    """The whole answer."""
    return whole_message([event async for _, item in items for event in writer.events(item)])


class MessagesErrorDetail(BaseModel):
    """What went wrong; the message names the field at fault."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
    ]
    message: str


class MessagesErrorBody(BaseModel):
    """The body of every error answer on these routes, and the data of an `error` event."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


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
