"""From a turn's items to the events of a response."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Discriminator, Json
from typing_extensions import TypeAliasType

from app.domain.errors import Busy, DjinnError
from app.domain.values import FinishReason
from app.messages import TurnFinished
from app.openai.response import IncompleteDetails, ResponseErrorView, ResponseObject, ResponseUsage
from app.openai.response_items import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessageItem,
    OutputTextPart,
    ScoredText,
    ScoredToken,
    new_id,
)
from app.text.generation import TextChunk
from app.text.tokenizer import Tokens
from app.tools.reader import AnswerReader, CallArguments, CallBegun, Content, Piece
from app.web.errors import body_of

Event = dict[str, Any]
"""One event without its `sequence_number`, for `orjson` to write."""


class Output:
    """Takes the pieces of an answer. At most one item is open: text opens a message, and a call ends it."""

    def __init__(self) -> None:
        self._items: list[OutputMessageItem | FunctionCallItem] = []
        self._scored = ScoredText()
        """Log-probabilities of the message that was opened last."""
        self.called: list[str] = []
        """The names of the functions that were called."""
        self._is_open = False

    @property
    def items(self) -> list[OutputMessageItem | FunctionCallItem]:
        """Those that are done, and at the end the open one as far as it has come."""
        if self._is_open and isinstance(self._items[-1], OutputMessageItem):
            self._last_part().logprobs = self._scored.shown
        return list(self._items)

    def take(self, pieces: Iterable[Piece], logprobs: Sequence[ScoredToken]) -> Iterator[Event]:
        """The events of the next pieces. The `logprobs` are of the tokens that they came with."""
        for piece in pieces:
            match piece:
                case Content():
                    yield from self._say(piece.text, logprobs)
                    logprobs = ()
                case CallBegun():
                    yield from self._close("completed")
                    self.called.append(piece.name)
                    call = FunctionCallItem(
                        id=new_id("fc"), call_id=piece.id, name=piece.name, arguments="", status="in_progress"
                    )
                    yield self._open(call)
                case CallArguments():
                    call = self._last_call()
                    call.arguments += piece.text
                    yield self._event("response.function_call_arguments.delta", delta=piece.text)

    def finish(self, status: ItemStatus) -> Iterator[Event]:
        """The events of the end. An answer without anything is an empty message."""
        if not self._items:
            yield from self._open_message()
        yield from self._close(status)

    def _say(self, text: str, logprobs: Sequence[ScoredToken]) -> Iterator[Event]:
        if not text and not logprobs:
            return
        if not self._is_open or not isinstance(self._items[-1], OutputMessageItem):
            yield from self._close("completed")
            yield from self._open_message()
        self._last_part().text += text
        told = self._scored.take(logprobs)
        yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=told)

    def _open_message(self) -> Iterator[Event]:
        message = OutputMessageItem(id=new_id("msg"), content=[], status="in_progress")
        yield self._open(message)
        part, self._scored = OutputTextPart(text=""), ScoredText()
        message.content.append(part)
        yield self._event("response.content_part.added", content_index=0, part=part.model_dump())

    def _open(self, item: OutputMessageItem | FunctionCallItem) -> Event:
        self._items.append(item)
        self._is_open = True
        return {"type": "response.output_item.added", "output_index": self._index, "item": item.model_dump()}

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        if not self._is_open:
            return
        item = self._items[-1]
        item.status = status
        if isinstance(item, OutputMessageItem):
            part = self._last_part()
            told = self._scored.streamed
            yield self._event("response.output_text.done", content_index=0, text=part.text, logprobs=told)
            part.logprobs = self._scored.shown
            yield self._event("response.content_part.done", content_index=0, part=part.model_dump())
        else:
            yield self._event("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
        self._is_open = False
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item.model_dump()}

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event of the open item."""
        return {"type": kind, "item_id": self._items[-1].id, "output_index": self._index, **fields}

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _last_part(self) -> OutputTextPart:
        message = self._items[-1]
        assert isinstance(message, OutputMessageItem)
        part = message.content[0]
        assert isinstance(part, OutputTextPart)
        return part

    def _last_call(self) -> FunctionCallItem:
        call = self._items[-1]
        assert isinstance(call, FunctionCallItem)
        return call


LAST_EVENTS = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}
CANCELLED_EVENT = "response.incomplete"
"""The API has no event of its own for a response that was cancelled."""


class ResponseWriter:
    """Writes the events of one response, and keeps the response as it is so far."""

    def __init__(self, response: ResponseObject, tokens: Tokens, reader: AnswerReader | None) -> None:
        """`reader` finds the calls of an answer; None: there are no tools, and all of an answer is text."""
        self.response = response
        self._tokens = tokens
        self._reader = reader
        self._output = Output()
        self._number = 0

    @property
    def called(self) -> list[str]:
        """The names of the functions that the client is to call: none if one of the calls is cut."""
        return self._output.called if self._reader is not None and self._reader.is_whole else []

    def begin(self) -> Iterator[Event]:
        """The events before the first token."""
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self.response.model_dump()})

    def write(self, chunk: TextChunk) -> Iterator[Event]:
        """The events of the next text."""
        pieces = [Content(chunk.text)] if self._reader is None else self._reader.push(chunk.text)
        yield from self._all(self._output.take(pieces, [ScoredToken.of(each, self._tokens) for each in chunk.logprobs]))

    def finish(self, finished: TurnFinished) -> Iterator[Event]:
        """The events of the end but the last one. From now on the response is whole."""
        if self._reader is not None:
            yield from self._all(self._output.take(self._reader.finish(), ()))
        is_whole = finished.reason is FinishReason.STOP
        yield from self._all(self._output.finish("completed" if is_whole else "incomplete"))
        if finished.reason is FinishReason.LENGTH:
            self.response.status = "incomplete"
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            self.response.status = "completed" if is_whole else "cancelled"
        self.response.usage = ResponseUsage.of(finished.usage)
        self._end()

    def cancel(self) -> None:
        """The client has gone, and reads no more."""
        self.response.status = "cancelled"
        self._end()

    def fail(self, error: Exception) -> None:
        """The turn has failed. Logs an error that is a bug."""
        message = orjson.loads(body_of(error))["error"]["message"]
        self.response.status = "failed"
        self.response.error = ResponseErrorView(code=_error_code(error), message=message)
        self._end()

    def last(self) -> Event:
        """The event that ends the stream."""
        kind = LAST_EVENTS.get(self.response.status, CANCELLED_EVENT)
        return self._numbered({"type": kind, "response": self.response.model_dump()})

    def _end(self) -> None:
        self.response.output = self._output.items
        if self.response.status == "completed":
            self.response.completed_at = int(time.time())

    def _all(self, events: Iterable[Event]) -> Iterator[Event]:
        return (self._numbered(event) for event in events)

    def _numbered(self, event: Event) -> Event:
        number, self._number = self._number, self._number + 1
        return {**event, "sequence_number": number}


def _error_code(error: Exception) -> Any:
    if isinstance(error, Busy):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, DjinnError) and error.status < 500 else "server_error"


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
