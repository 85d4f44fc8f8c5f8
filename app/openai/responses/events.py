"""The events of a response, from its creation to its end."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from app.domain.errors import Busy, DjinnError
from app.domain.values import FinishReason
from app.messages import TurnFinished
from app.openai.responses.output import Event, Output
from app.openai.responses.response import IncompleteDetails, ResponseErrorView, ResponseObject, ResponseUsage
from app.openai.responses.scored import ScoredToken
from app.text.generation import TextChunk
from app.text.tokenizer import Tokens
from app.tools.pieces import AnswerReader, Content
from app.web.errors.bodies import body_of

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
