"""Answers to a chat, whole or in chunks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import orjson

from app.domain.values import TokenLogprobs
from app.messages import TurnFinished
from app.openai.answers import Entry, openai_finish_reason
from app.openai.chat import (
    AnswerFunction,
    AnswerMessage,
    AnswerToolCall,
    ChatChoice,
)
from app.text.generation import TextChunk, TextItem
from app.text.tokenizer import Tokens
from app.tools.pieces import AnswerReader, CallArguments, CallBegun, Content, Piece

Delta = dict[str, Any]


class ChatChunkWriter:
    """Writes the entries of `chat.completion.chunk`s.

    A choice's role comes with its first token and no earlier, so that clients who time the first chunk time the token.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        logprobs: bool,
        new_reader: Callable[[], AnswerReader | None] = lambda: None,
        on_calls: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> None:
        """`new_reader` finds the calls of an answer; without one all of it is content.

        `on_calls` is told the tools that an answer has called, once it is over and before its last entry. An answer
        that ran out of tokens calls nothing: its last call may be incomplete.
        """
        self._tokens = tokens
        self._new_reader = new_reader
        self._on_calls = on_calls
        self._logprobs = logprobs
        self._readers: dict[int, AnswerReader | None] = {}
        self._called: dict[int, list[str]] = {}

    async def entries(self, index: int, item: TextItem) -> Sequence[Entry]:
        """See `ChunkWriter`."""
        return list(self._entries(index, item))

    def _entries(self, index: int, item: TextItem) -> Iterator[Entry]:
        if not isinstance(item, TextChunk | TurnFinished):
            return
        if index not in self._readers:
            self._readers[index] = self._new_reader()
            yield _entry(index, {"role": "assistant", "content": ""})
        reader = self._readers[index]
        if isinstance(item, TurnFinished):
            left = list(self._deltas(index, reader.finish() if reader else ()))
            called, reason = self._called.pop(index, []), openai_finish_reason(item)
            is_waiting = reader is not None and reader.is_whole and reason == "stop"
            if is_waiting:
                self._on_calls(called)
            yield from (_entry(index, delta) for delta in left)
            yield _entry(index, {}, finish_reason="tool_calls" if is_waiting else reason)
            return
        deltas = list(self._deltas(index, reader.push(item.text) if reader else [Content(item.text)]))
        if self._logprobs:
            logprobs = {"content": _encoded(item.logprobs, self._tokens), "refusal": None}
            first, *deltas = deltas or [{"content": ""}]
            yield _entry(index, first, logprobs=logprobs)
        yield from (_entry(index, delta) for delta in deltas if delta.get("content") != "")

    def _deltas(self, index: int, pieces: Iterable[Piece]) -> Iterator[Delta]:
        for piece in pieces:
            match piece:
                case Content():
                    yield {"content": piece.text}
                case CallBegun():
                    self._called.setdefault(index, []).append(piece.name)
                    call = {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
                    yield {"tool_calls": [{"index": piece.index, **call}]}
                case CallArguments():
                    yield {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def whole_choice(index: int, entries: Sequence[Entry]) -> Entry:
    """Put one choice together from its entries: a `ChatChoice`, for `whole_json` to write."""
    scored = [entry["logprobs"]["content"] for entry in entries if entry["logprobs"]]
    logprobs = {"content": list(chain.from_iterable(scored)), "refusal": None} if scored else None
    return _said(index, entries).model_dump() | {"logprobs": logprobs}


def _said(index: int, entries: Sequence[Entry]) -> ChatChoice:
    """One choice, without its log-probabilities: they are JSON already."""
    content = "".join(entry["delta"].get("content", "") for entry in entries)
    calls = _whole_calls(call for entry in entries for call in entry["delta"].get("tool_calls", ()))
    return ChatChoice(
        index=index,
        message=AnswerMessage(content=None if calls and not content else content, tool_calls=calls or None),
        logprobs=None,
        finish_reason=entries[-1]["finish_reason"],
    )


def _whole_calls(deltas: Iterable[Delta]) -> list[AnswerToolCall]:
    calls: list[AnswerToolCall] = []
    for delta in deltas:
        if "id" in delta:
            calls.append(AnswerToolCall(id=delta["id"], function=AnswerFunction(**delta["function"])))
        else:
            calls[delta["index"]].function.arguments += delta["function"]["arguments"]
    return calls


def _encoded(found: Iterable[TokenLogprobs], tokens: Tokens) -> list[orjson.Fragment]:
    """Each token as the JSON of a `ChatTokenLogprob`: a tenth of its size as objects, of which a long answer has
    millions.
    """
    return [
        orjson.Fragment(
            orjson.dumps(
                {
                    **_alternative(tokens, each.token_id, each.logprob),
                    "top_logprobs": [_alternative(tokens, *top) for top in each.top],
                }
            )
        )
        for each in found
    ]


def _alternative(tokens: Tokens, token_id: int, logprob: float) -> dict[str, Any]:
    text, utf8 = tokens.token_text(token_id), tokens.token_bytes(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(utf8)}


def _entry(
    index: int, delta: Delta, *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> Entry:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
