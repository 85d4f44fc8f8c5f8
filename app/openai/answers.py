"""What whole and streamed answers of both generating routes have in common: both are made of the same chunks."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import orjson

from app.domain.values import FinishReason, ModelInfo, TurnUsage
from app.messages import Started, TurnFinished
from app.openai.fields import StreamOptions, Usage
from app.text.generation import TextChunk, TextItem
from app.web.errors.bodies import body_of

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
