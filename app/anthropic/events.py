"""From a turn's items to the events of an answer."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from app.anthropic.answers import Event, MessageUsage, StopReason
from app.anthropic.messages import ID_PREFIX
from app.domain.values import FinishReason
from app.messages import Started, TurnFinished
from app.text.generation import TextChunk, TextItem
from app.tools.pieces import AnswerReader, CallArguments, CallBegun, Content, Piece


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
