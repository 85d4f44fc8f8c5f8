"""Answers of the generating routes, whole and streamed: both are made of the same chunks."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Literal, Protocol

import orjson

from app.domain.values import FinishReason, ModelInfo, TokenLogprobs, TurnUsage
from app.messages import Started, TurnFinished
from app.openai.chat import (
    AnswerFunction,
    AnswerMessage,
    AnswerToolCall,
    ChatChoice,
)
from app.openai.fields import StreamOptions, Usage
from app.text.generation import TextChunk, TextItem
from app.text.tokenizer import Tokens
from app.tools.reader import AnswerReader, CallArguments, CallBegun, Content, Piece
from app.web.errors import body_of

Items = AsyncIterator[tuple[int, TextItem]]
"""What `Choices` yields: an item and the index of its choice."""

Entry = dict[str, Any]
"""One entry of a chunk's `choices`, to be written as JSON."""


class ChunkWriter(Protocol):
    """Turns items into the chunks of one kind of answer."""

    async def entries(self, index: int, item: TextItem) -> Sequence[Entry]:
        """What choice `index`'s next item gives, each for a chunk of its own. Others have turns of the event loop
        while a long one is written.
        """
        ...


class Written(Protocol):
    """A part of an answer that is JSON already."""

    def fragment(self) -> orjson.Fragment:
        """The JSON."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that open an answer and each of its chunks.

    `system_fingerprint` changes with what can make equal seeds give other results.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: Literal["chatcmpl", "cmpl"], info: ModelInfo) -> Head:
        """The head of a new answer."""
        configuration = hashlib.sha256(repr(info).encode()).hexdigest()
        return cls(
            id=f"{prefix}-{secrets.token_hex(16)}",
            created=int(time.time()),
            model=info.name,
            system_fingerprint=f"fp_{configuration[:10]}",
        )

    def fields(self) -> dict[str, Any]:
        """The head as JSON fields."""
        return asdict(self)


class UsageCount:
    """Adds up what a call's choices cost; `n` choices in a row share a prompt, which has `prompt_tokens`."""

    def __init__(self, n: int, prompt_tokens: Sequence[int] = ()) -> None:
        self._n = n
        self._prompt_tokens = prompt_tokens
        self._cached: Counter[int] = Counter()
        self._generated: Counter[int] = Counter()
        self._usages: dict[int, TurnUsage] = {}

    def take(self, index: int, item: TextItem) -> None:
        """Take choice `index`'s next item."""
        if isinstance(item, Started):
            self._cached[index] = item.cached_tokens
        elif isinstance(item, TextChunk):
            self._generated[index] += len(item.token_ids)
        elif isinstance(item, TurnFinished):
            self._usages[index] = item.usage

    def so_far(self, index: int) -> Usage:
        """What choice `index` alone has cost until now."""
        return Usage.of_tokens(
            prompt=self._prompt_tokens[index // self._n],
            completion=self._generated[index],
            cached=self._cached[index],
        )

    def total(self) -> Usage:
        """The sum over the choices that have finished."""
        firsts = (usage for index, usage in self._usages.items() if index % self._n == 0)
        return Usage.of(firsts, self._usages.values())


def openai_finish_reason(finished: TurnFinished) -> Literal["stop", "length"]:
    """Why the turn ended, in OpenAI's words."""
    return "stop" if finished.reason is FinishReason.STOP else "length"


async def collect(items: Items, writer: ChunkWriter, *, n: int, count: int) -> tuple[list[list[Entry]], Usage]:
    """Read all `count` choices to their ends; returns each one's entries, and the usage."""
    usage = UsageCount(n)
    collected: list[list[Entry]] = [[] for _ in range(count)]
    async for index, item in items:
        usage.take(index, item)
        collected[index].extend(await writer.entries(index, item))
    return collected, usage.total()


async def stream(
    items: Items,
    writer: ChunkWriter,
    head: dict[str, Any],
    *,
    n: int,
    prompt_tokens: Sequence[int],
    options: StreamOptions,
) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a streamed answer, in OpenAI's framing.

    With `include_usage`, every chunk has a `usage`: in the last that of the call, in the others null, or with
    `continuous_usage_stats` what its choice has cost so far, of a prompt with as many `prompt_tokens`. An error after
    the stream has begun is an event too; no `[DONE]` follows it.
    """
    if options.include_usage:
        head = {**head, "usage": None}
    usage = UsageCount(n, prompt_tokens)
    try:
        async for index, item in items:
            usage.take(index, item)
            for entry in await writer.entries(index, item):
                chunk = {**head, "choices": [entry]}
                if options.include_usage and options.continuous_usage_stats:
                    chunk["usage"] = usage.so_far(index).model_dump()
                yield _event(_json(chunk))
    except Exception as error:
        yield _event(body_of(error))
        return
    if options.include_usage:
        yield _event(orjson.dumps({**head, "choices": [], "usage": usage.total().model_dump()}))
    yield _event(b"[DONE]")


async def whole_json(head: dict[str, Any], choices: Iterable[Entry], **others: object) -> bytes:
    """The JSON of an answer that is not streamed. Others have turns of the event loop between its choices."""
    written = []
    for choice in choices:
        written.append(orjson.Fragment(_json(choice)))
        await asyncio.sleep(0)
    return orjson.dumps({**head, "choices": written, **others})


def _json(value: object) -> bytes:
    return orjson.dumps(value, default=_fragment)


def _fragment(part: Written) -> orjson.Fragment:
    return part.fragment()


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


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
