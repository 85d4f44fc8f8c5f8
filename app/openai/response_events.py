"""From a turn's items to the events of a response, and the responses whose events come without a client."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

import orjson

from app.domain.errors import Busy, DjinnError
from app.domain.tasks import Tasks
from app.domain.values import FinishReason, TokenLogprobs
from app.messages import Reading, TurnFinished
from app.openai.logprobs import ScoredText
from app.openai.response import IncompleteDetails, ResponseErrorView, ResponseObject, ResponseUsage
from app.openai.response_items import (
    CallItem,
    CustomToolCallItem,
    FunctionCallItem,
    ItemStatus,
    OutputMessageItem,
    OutputTextPart,
    ReasoningItem,
    SummaryPart,
    ThoughtPart,
    new_id,
)
from app.openai.response_tools import OfferedTool
from app.text.generation import TextChunk
from app.text.tokenizer import Tokens
from app.tools.reader import Answer, CallArguments, CallBegun, Content, Reasoning
from app.tools.thinking import Seal
from app.web.errors import body_of
from app.web.sse import sse_event
from app.wire.turns import Djinn, by_kind, djinn_of

Event = dict[str, Any]
"""One event, for `orjson` to write. `ResponseWriter` gives each its `sequence_number` last."""

LAST_EVENTS = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}
CANCELLED_EVENT = "response.incomplete"
"""The API has no event of its own for a response that was cancelled."""


class ResponseWriter:
    """Writes the events of one response, and keeps the response as it is so far.

    At most one item is open, the last: text opens a message, and a call ends it.
    """

    def __init__(
        self,
        response: ResponseObject,
        tokens: Tokens,
        answer: Answer,
        tools: Mapping[str, OfferedTool] | None = None,
        *,
        generates: bool = True,
        as_summary: bool = False,
        seal: Seal | None = None,
    ) -> None:
        """`tools`: those whose calls are not told as calls of functions by the model's own name, by that name.
        `generates`: whether there is to be any output. Thoughts are told `as_summary`, or as content. `seal` seals
        them; None: the call did not ask for sealed thoughts.
        """
        self._as_summary = as_summary
        self._seal = seal
        self.response = response
        self._tools = tools or {}
        self._generates = generates
        self._tokens = tokens
        self._answer = answer
        self._items: list[OutputMessageItem | CallItem | ReasoningItem] = []
        self._is_open = False
        self._held: tuple[OfferedTool, FunctionCallItem] | None = None
        """The call whose arguments come, if its item can only be told at their end."""
        self._scored = ScoredText(tokens)
        """Log-probabilities of the message that was opened last."""
        self._unsaid: list[TokenLogprobs] = []
        """Those of text that is held back, as it may begin a call."""
        self._untold: list[Reading] = []
        self._number = 0

    def begin(self) -> Iterator[Event]:
        """The events before the first token; of a response in the background, those before its turn runs."""
        for kind in ("created", self.response.status):
            yield self._numbered({"type": f"response.{kind}", "response": self.response.model_dump()})

    def start(self) -> Iterator[Event]:
        """The turn has left the queue."""
        if self.response.status == "queued":
            self.response.status = "in_progress"
            yield self._numbered({"type": "response.in_progress", "response": self.response.model_dump()})

    def write(self, chunk: TextChunk) -> Iterator[Event]:
        """The events of the next text."""
        return map(self._numbered, self._take(chunk))

    def read(self, found: Reading) -> None:
        """The next event tells of what has been read inside the model, and so does the response at its end."""
        self._untold.append(found)
        told = self.response.djinn = self.response.djinn or Djinn()
        for kind, readings in by_kind([found]).items():
            setattr(told, kind, getattr(told, kind) or [])
            getattr(told, kind).extend(readings)

    def finish(self, finished: TurnFinished) -> Iterator[Event]:
        """The events of the end but the last one. From now on the response is whole."""
        yield from map(self._numbered, self._take(finished))
        is_whole = finished.reason is FinishReason.STOP or not self._generates
        if not self._items and self._held is None and self._generates:  # an answer without anything is an empty message
            yield from map(self._numbered, self._open_message())
        yield from map(self._numbered, self._close("completed" if is_whole else "incomplete"))
        if finished.reason in (FinishReason.LENGTH, FinishReason.PROBE) and self._generates:
            self.response.status = "incomplete"
            is_guarded = finished.reason is FinishReason.PROBE
            why = IncompleteDetails(reason="content_filter" if is_guarded else "max_output_tokens")
            self.response.incomplete_details = why
        else:
            self.response.status = "completed" if is_whole else "cancelled"
        self.response.usage = ResponseUsage.of(finished.usage, self._answer.reasoning_tokens)
        self._end()

    def cancel(self) -> None:
        """The client has gone, and reads no more."""
        self.response.status = "cancelled"
        self._end()

    def fail(self, error: Exception) -> None:
        """The turn has failed. Logs an error that is a bug."""
        message = orjson.loads(body_of(error))["error"]["message"]
        code: Any = "server_error"
        if isinstance(error, DjinnError) and error.status < 500:
            code = "rate_limit_exceeded" if isinstance(error, Busy) else "invalid_prompt"
        self.response.status = "failed"
        self.response.error = ResponseErrorView(code=code, message=message)
        self._end()

    def last(self) -> Event:
        """The event that ends the stream."""
        kind = LAST_EVENTS.get(self.response.status, CANCELLED_EVENT)
        return self._numbered({"type": kind, "response": self.response.model_dump()})

    def _end(self) -> None:
        last = self._items[-1] if self._is_open else None
        if isinstance(last, OutputMessageItem) and last.content:  # a client may go before its part is told
            self._last_part().logprobs = self._scored.shown
        self.response.output = list(self._items)
        if self.response.status == "completed":
            self.response.completed_at = int(time.time())

    def _numbered(self, event: Event) -> Event:
        number, self._number = self._number, self._number + 1
        untold, self._untold = self._untold, []
        return {**event, **djinn_of(untold), "sequence_number": number}

    def _take(self, item: TextChunk | TurnFinished) -> Iterator[Event]:
        thought = self._answer.tokens_before_content
        pieces = self._answer.pieces(item)
        thought = max(0, self._answer.tokens_before_content - thought)
        logprobs = [*self._unsaid, *(item.logprobs if isinstance(item, TextChunk) else ())][thought:]
        for piece in pieces:
            match piece:
                case Reasoning():
                    if not self._is_open or not isinstance(self._items[-1], ReasoningItem):
                        yield from self._close("completed")
                        yield from self._open_thoughts()
                    self._thoughts().text += piece.text
                    if not thought:  # later ones, which the answer does not count
                        logprobs = []
                    yield self._thought_event("delta", delta=piece.text)
                case Content() if piece.text or logprobs:
                    if not self._is_open or not self._is_message:
                        yield from self._close("completed")
                        yield from self._open_message()
                    self._last_part().text += piece.text
                    told, logprobs = self._scored.take(logprobs), []
                    yield self._event("response.output_text.delta", content_index=0, delta=piece.text, logprobs=told)
                case CallBegun():
                    logprobs = []
                    yield from self._close("completed")
                    tool = self._tools.get(piece.name)
                    call = FunctionCallItem(
                        id=new_id("fc"),
                        call_id=piece.id,
                        name=piece.name if tool is None or tool.name is None else tool.name,
                        namespace=None if tool is None else tool.namespace,
                        arguments="",
                        status="in_progress",
                    )
                    if tool is None or tool.type == "function":
                        yield self._open(call)
                    else:
                        self._held = tool, call
                case CallArguments():
                    logprobs = []
                    if self._held is not None:
                        self._held[1].arguments += piece.text
                        continue
                    last = self._items[-1]
                    assert isinstance(last, FunctionCallItem)
                    last.arguments += piece.text
                    yield self._event("response.function_call_arguments.delta", delta=piece.text)
        self._unsaid = logprobs
        if isinstance(item, TurnFinished) and logprobs and self._is_open and self._is_message:
            told, self._unsaid = self._scored.take(logprobs), []
            yield self._event("response.output_text.delta", content_index=0, delta="", logprobs=told)

    def _open_message(self) -> Iterator[Event]:
        message = OutputMessageItem(id=new_id("msg"), content=[], status="in_progress")
        yield self._open(message)
        part, self._scored = OutputTextPart(text=""), ScoredText(self._tokens)
        message.content.append(part)
        yield self._event("response.content_part.added", content_index=0, part=part.model_dump())

    def _open_thoughts(self) -> Iterator[Event]:
        item = ReasoningItem(id=new_id("rs"), status="in_progress")
        yield self._open(item)
        if self._as_summary:
            item.summary.append(SummaryPart(text=""))
        else:
            item.content.append(ThoughtPart(text=""))
        yield self._part_event("added")

    def _thoughts(self) -> SummaryPart | ThoughtPart:
        item = self._items[-1]
        assert isinstance(item, ReasoningItem)
        return item.summary[0] if self._as_summary else item.content[0]

    def _thought_event(self, what: str, **fields: Any) -> Event:
        if self._as_summary:
            return self._event(f"response.reasoning_summary_text.{what}", summary_index=0, **fields)
        return self._event(f"response.reasoning_text.{what}", content_index=0, **fields)

    def _part_event(self, what: str) -> Event:
        part = self._thoughts().model_dump()
        if self._as_summary:
            return self._event(f"response.reasoning_summary_part.{what}", summary_index=0, part=part)
        return self._event(f"response.content_part.{what}", content_index=0, part=part)

    def _open(self, item: OutputMessageItem | CallItem | ReasoningItem) -> Event:
        self._items.append(item)
        self._is_open = True
        return {"type": "response.output_item.added", "output_index": self._index, "item": item.model_dump()}

    def _tell_held(self, status: ItemStatus) -> Iterator[Event]:
        """The whole of a call whose form is its tool's, which only all its arguments show."""
        if self._held is None:
            return
        (tool, held), self._held = self._held, None
        call = tool.call(held, status)
        yield self._open(call)
        if isinstance(call, CustomToolCallItem):
            yield self._event("response.custom_tool_call_input.delta", delta=call.input)
            yield self._event("response.custom_tool_call_input.done", input=call.input)
        elif isinstance(call, FunctionCallItem):
            yield self._event("response.function_call_arguments.delta", delta=call.arguments)
            yield self._event("response.function_call_arguments.done", name=call.name, arguments=call.arguments)
        self._is_open = False
        yield {"type": "response.output_item.done", "output_index": self._index, "item": call.model_dump()}

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        yield from self._tell_held(status)
        if not self._is_open:
            return
        item = self._items[-1]
        assert isinstance(item, OutputMessageItem | FunctionCallItem | ReasoningItem)
        item.status = status
        if isinstance(item, OutputMessageItem):
            part = self._last_part()
            told = self._scored.streamed
            yield self._event("response.output_text.done", content_index=0, text=part.text, logprobs=told)
            part.logprobs = self._scored.shown
            yield self._event("response.content_part.done", content_index=0, part=part.model_dump())
        elif isinstance(item, ReasoningItem):
            yield self._thought_event("done", text=self._thoughts().text)
            yield self._part_event("done")
            if self._seal is not None:
                item.encrypted_content = self._seal.close(item.text)
        else:
            yield self._event("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
        self._is_open = False
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item.model_dump()}

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event of the open item."""
        return {"type": kind, "item_id": self._items[-1].id, "output_index": self._index, **fields}

    @property
    def _is_message(self) -> bool:
        return isinstance(self._items[-1], OutputMessageItem)

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _last_part(self) -> OutputTextPart:
        message = self._items[-1]
        assert isinstance(message, OutputMessageItem)
        part = message.content[0]
        assert isinstance(part, OutputTextPart)
        return part


MOST_EVENTS_BYTES = 64 << 20
"""Of the events of all responses. Those of responses that are over are forgotten for new ones, the oldest first."""
LATE_S = 1.0


class Followed:
    """The events of one response, for any number of clients, each from where it likes."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        self.size = 0
        """Bytes of all events."""
        self._events: list[bytes] = []
        self._news = asyncio.Event()

    def add(self, event: Event) -> None:
        """Take the next event."""
        self._events.append(sse_event(event["type"], orjson.dumps(event)))
        self.size += len(self._events[-1])
        self._wake()

    def end(self) -> None:
        """No event comes any more."""
        self.is_over.set()
        self._wake()

    async def events(self, first: int = 0) -> AsyncGenerator[bytes, None]:
        """Those from number `first` on, as they come. The last is never left out."""
        while True:
            news = self._news
            if self.is_over.is_set():
                first = max(0, min(first, len(self._events) - 1))
            while first < len(self._events):
                first += 1
                yield self._events[first - 1]
            if self.is_over.is_set():
                return
            if news is self._news:
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class BackgroundResponses:
    """Responses that are generated without a client. Clients may follow those that run, and those whose events are
    remembered. Used on the event loop only.
    """

    def __init__(self, most_bytes: int = MOST_EVENTS_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._followed: OrderedDict[str, Followed] = OrderedDict()
        """By the id of the response, those that began first in front."""
        self._running = Tasks()

    def begin(self, response_id: str, events: AsyncGenerator[Event, None], cleanup: AsyncExitStack) -> Followed:
        """Read the events of a response to their end, even if no client follows them. Then unwind `cleanup`."""
        followed = Followed()
        self._followed[response_id] = followed
        self._running.start(self._read(response_id, events, cleanup))
        return followed

    def find(self, response_id: str) -> Followed | None:
        """The events of a response; None: they are forgotten, or it was never in the background."""
        return self._followed.get(response_id)

    def forget(self, response_id: str) -> None:
        """Forget the events of a response that is kept, or was."""
        found = self._followed.pop(response_id, None)
        if found is not None and found.is_over.is_set():
            self._bytes -= found.size

    async def close(self) -> None:
        """Cancel those that still run, as the server ends."""
        await self._running.close(LATE_S)  # of a turn that has just come to its end, the response is not kept yet

    async def _read(self, response_id: str, events: AsyncGenerator[Event, None], cleanup: AsyncExitStack) -> None:
        followed = self._followed[response_id]
        try:
            async with cleanup, aclosing(events):
                async for event in events:
                    followed.add(event)
        finally:
            followed.end()
            if response_id in self._followed:
                self._bytes += followed.size
        over = [each for each, found in self._followed.items() if found.is_over.is_set()]
        while self._bytes > self._most_bytes:
            self.forget(over.pop(0))
