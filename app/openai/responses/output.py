"""The items of a response as they are generated, and the events that tell of them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from app.openai.responses.items import (
    FunctionCallItem,
    ItemStatus,
    OutputMessageItem,
    OutputTextPart,
    new_id,
)
from app.openai.responses.scored import ScoredText, ScoredToken
from app.tools.pieces import CallArguments, CallBegun, Content, Piece

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
