"""The turns behind one call, and its answers, whole and streamed: both are made of the same chunks."""

import asyncio
import hashlib
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Literal

import orjson

from app.domain.errors import Draining, TurnCancelled
from app.domain.values import FinishReason, ModelInfo, TurnUsage
from app.messages import Reading, Started, TurnFinished
from app.openai.fields import StreamOptions
from app.openai.logprobs import json_list, one_list, scored_token
from app.sessions.charges import TurnCharge
from app.sessions.keyed import KeyedRequest
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.sessions.turns import TurnRequest
from app.text.generation import TextChunk, TextItem, TurnReader
from app.text.tokenizer import Tokens
from app.tools.reader import Answer, CallArguments, CallBegun, Content, Piece, Reasoning
from app.web.errors import body_of
from app.wire.turns import MAX_SEED, djinn_of

STARTED_AT_ONCE = 16
"""Turns that a call starts before others have their turn of the event loop: of long prompts each takes half a
millisecond.
"""


class Choices:
    """Runs `n` turns for each of `requests`. Choice `index` is number `index % n` of prompt `index // n`.

    Every choice has a session of its own. The first choice of a prompt computes the prompt. The others start once it
    has, and find all full blocks of the prompt in the prefix cache. A fork of the first would share the last, partly
    filled block too, but the first is generating by then, and only idle sessions can be forked.
    """

    def __init__(
        self,
        registry: SessionRegistry,
        requests: Sequence[TurnRequest],
        n: int,
        charges: Sequence[TurnCharge],
        sessions: Sequence[Session],
        cleanup: AsyncExitStack,
        keyed: KeyedRequest | None = None,
    ) -> None:
        """`charges` are what has been reserved for each choice, and `sessions` where it runs. `cleanup` ends what still
        runs and closes the sessions. It is unwound once every choice has finished, and must be when its reader has
        gone. `keyed` is the call, if it has an `Idempotency-Key`.
        """
        self._registry = registry
        self._requests = requests
        self._n = n
        self._cleanup = cleanup
        self._keyed = keyed
        self._merged: asyncio.Queue[tuple[int, TextItem | Exception]] = asyncio.Queue(maxsize=1)
        self._only: TurnReader | None = None
        """That of the only choice, which is merged with nothing."""
        self._sessions = sessions
        self._charges = charges
        self._to_finish = len(requests) * n

    async def start(self) -> None:
        """Submit the first choice of every prompt.

        Raises what `Turns.start` raises. Of choices that have begun before a `Busy`, nothing is left once `cleanup`
        unwinds.
        """
        await self._start_choices(range(0, self._to_finish, self._n))

    async def __aiter__(self) -> AsyncIterator[tuple[int, TextItem]]:
        """The items of all choices, each with its index, until every choice has finished.

        Raises the error of the first turn that fails; `TurnCancelled` if another request cancelled it, or
        `Draining` if the server did it.
        """
        computed: set[int] = set()
        async for index, item in self._items():
            if index % self._n == 0 and isinstance(item, TextChunk | TurnFinished) and index not in computed:
                computed.add(index)
                await self._start_choices(range(index + 1, index + self._n))
            if isinstance(item, TurnFinished):
                self._to_finish -= 1
                if item.reason is FinishReason.CANCELLED:
                    if self._registry.table.draining:
                        raise Draining("the server is shutting down; the turn was cancelled")
                    raise TurnCancelled
            yield index, item
        await self._cleanup.aclose()  # a client's next call, which its answer lets it make, finds the sessions closed
        if self._keyed is not None:
            self._keyed.is_answered = True

    async def _items(self) -> AsyncIterator[tuple[int, TextItem]]:
        if self._only is not None:
            async for item in self._only:
                yield 0, item
            return
        while self._to_finish:
            index, merged = await self._merged.get()
            if isinstance(merged, Exception):
                raise merged
            yield index, merged

    async def _start_choices(self, indices: Sequence[int]) -> None:
        for count, index in enumerate(indices):
            if count and count % STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            self._start_choice(index)

    def _start_choice(self, index: int) -> None:
        prompt, number = divmod(index, self._n)
        request = self._requests[prompt]
        if number:  # choices differ in their seeds; only the first reports the prompt's log-probabilities
            seed = (request.sampling.seed + number) % (MAX_SEED + 1)
            request = replace(request, sampling=replace(request.sampling, seed=seed, prompt_logprobs=None))
        reader = self._registry.turns.start(self._sessions[index], request, self._cleanup, self._charges[index])
        if len(self._sessions) == 1:
            self._only = reader
            return
        task = asyncio.create_task(self._pump(index, reader))
        self._cleanup.push_async_callback(_end, task)

    async def _pump(self, index: int, reader: TurnReader) -> None:
        """Move one choice's items to the reader, no faster than it reads."""
        try:
            async for item in reader:
                await self._merged.put((index, item))
        except Exception as error:  # the reader raises it
            await self._merged.put((index, error))


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


Items = AsyncIterator[tuple[int, TextItem]]
"""What `Choices` yields: an item and the index of its choice."""

Entry = dict[str, Any]
"""One entry of a chunk's `choices`, to be written as JSON. `bytes` in it are JSON already."""


class ChunkWriter(ABC):
    """Turns items into the chunks of one kind of answer."""

    def reasoning_tokens(self, index: int) -> int | None:
        """How many tokens choice `index` has thought so far; None: the answer tells no thoughts."""
        return None

    @abstractmethod
    async def entries(self, index: int, item: TextItem) -> Sequence[Entry]:
        """What choice `index`'s next item gives, each for a chunk of its own. Others have turns of the event loop
        while a long one is written.
        """


def head_of(prefix: Literal["chatcmpl", "cmpl"], info: ModelInfo) -> dict[str, Any]:
    """The fields that open a new answer and each of its chunks.

    `system_fingerprint` changes with what can make equal seeds give other results.
    """
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "created": int(time.time()),
        "model": info.name,
        "system_fingerprint": f"fp_{hashlib.sha256(repr(info).encode()).hexdigest()[:10]}",
    }


class UsageCount:
    """Adds up what a call's choices cost; `n` choices in a row share a prompt, which has `prompt_tokens`."""

    def __init__(self, n: int, writer: ChunkWriter, prompt_tokens: Sequence[int] = ()) -> None:
        self._n = n
        self._writer = writer
        self._prompt_tokens = prompt_tokens
        self._cached: Counter[int] = Counter()
        self._generated: Counter[int] = Counter()
        self._usages: dict[int, TurnUsage] = {}
        self.readings: list[Reading] = []
        """What has been read inside the model."""

    def take(self, index: int, item: TextItem) -> None:
        """Take choice `index`'s next item."""
        if isinstance(item, Started):
            self._cached[index] = item.cached_tokens
        elif isinstance(item, TextChunk):
            self._generated[index] += len(item.token_ids)
        elif isinstance(item, Reading):
            self.readings.append(item)
        elif isinstance(item, TurnFinished):
            self._usages[index] = item.usage

    def so_far(self, index: int) -> dict[str, Any]:
        """The `Usage` of choice `index` alone until now."""
        thought = self._writer.reasoning_tokens(index)
        return _usage(self._prompt_tokens[index // self._n], self._cached[index], self._generated[index], thought)

    def total(self) -> dict[str, Any]:
        """The `Usage` of the choices that have finished: a prompt counts once, with its first choice."""
        thought = [self._writer.reasoning_tokens(index) for index in self._usages]
        firsts = [usage for index, usage in self._usages.items() if index % self._n == 0]
        return _usage(
            sum(usage.prompt_tokens for usage in firsts),
            sum(usage.cached_tokens for usage in firsts),
            sum(usage.completion_tokens for usage in self._usages.values()),
            None if None in thought else sum(filter(None, thought)),
        )


def _usage(prompt: int, cached: int, completion: int, thought: int | None) -> dict[str, Any]:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return usage if thought is None else {**usage, "completion_tokens_details": {"reasoning_tokens": thought}}


def openai_finish_reason(finished: TurnFinished) -> Literal["stop", "length", "content_filter"]:
    """Why the turn ended, in OpenAI's words."""
    if finished.reason is FinishReason.PROBE:
        return "content_filter"
    return "stop" if finished.reason is FinishReason.STOP else "length"


async def collect(items: Items, writer: ChunkWriter, *, n: int, count: int) -> tuple[list[list[Entry]], UsageCount]:
    """Read all `count` choices to their ends; returns each one's entries, and what they have used."""
    usage = UsageCount(n, writer)
    collected: list[list[Entry]] = [[] for _ in range(count)]
    async for index, item in items:
        usage.take(index, item)
        collected[index].extend(await writer.entries(index, item))
    return collected, usage


def with_readings(head: dict[str, Any], readings: Sequence[Reading]) -> dict[str, Any]:
    """The head of an answer with what has been read inside the model, if there is anything."""
    return head if not readings else {**head, "djinn": {**head.get("djinn", {}), **djinn_of(readings)["djinn"]}}


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
    usage = UsageCount(n, writer, prompt_tokens)
    try:
        async for index, item in items:
            usage.take(index, item)
            if isinstance(item, Reading):
                yield _event(orjson.dumps({**with_readings(head, [item]), "choices": []}))
            for entry in await writer.entries(index, item):
                chunk = {**head, "choices": [entry]}
                if options.include_usage and options.continuous_usage_stats:
                    chunk["usage"] = usage.so_far(index)
                yield _event(_json(chunk))
    except Exception as error:
        yield _event(body_of(error))
        return
    if options.include_usage:
        yield _event(orjson.dumps({**head, "choices": [], "usage": usage.total()}))
    yield _event(b"[DONE]")


async def whole_json(head: dict[str, Any], choices: Iterable[Entry], **others: object) -> bytes:
    """The JSON of an answer that is not streamed. Others have turns of the event loop between its choices."""
    written = []
    for choice in choices:
        written.append(orjson.Fragment(_json(choice)))
        await asyncio.sleep(0)
    return orjson.dumps({**head, "choices": written, **others})


def _json(value: object) -> bytes:
    return orjson.dumps(value, default=orjson.Fragment)


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


class ChatChunkWriter(ChunkWriter):
    """Writes the entries of `chat.completion.chunk`s.

    A choice's role comes with its first token and no earlier, so that clients who time the first chunk time the token.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        logprobs: bool,
        new_answer: Callable[[], Answer],
        on_calls: Callable[[Sequence[str]], None],
        thinks: bool = False,
    ) -> None:
        """`on_calls` is told the tools that an answer has called, once it is over and before its last entry. An answer
        that ran out of tokens calls nothing: its last call may be incomplete. `thinks`: the model does.
        """
        self._thinks = thinks
        self._tokens = tokens
        self._new_answer = new_answer
        self._on_calls = on_calls
        self._logprobs = logprobs
        self._answers: dict[int, Answer] = {}

    def reasoning_tokens(self, index: int) -> int | None:
        return self._answers[index].reasoning_tokens if self._thinks and index in self._answers else None

    async def entries(self, index: int, item: TextItem) -> Sequence[Entry]:
        return list(self._entries(index, item)) if isinstance(item, TextChunk | TurnFinished) else ()

    def _entries(self, index: int, item: TextChunk | TurnFinished) -> Iterator[Entry]:
        if index not in self._answers:
            self._answers[index] = self._new_answer()
            yield _entry(index, {"role": "assistant", "content": ""})
        answer = self._answers[index]
        deltas = [_delta(piece) for piece in answer.pieces(item)]
        if isinstance(item, TurnFinished):
            reason: str = openai_finish_reason(item)
            if answer.calls and reason == "stop":
                self._on_calls(answer.calls)
                reason = "tool_calls"
            yield from (_entry(index, delta) for delta in deltas)
            yield _entry(index, {}, finish_reason=reason)
            return
        if self._logprobs:
            scored = json_list(scored_token(each, self._tokens) for each in item.logprobs)
            first, *deltas = deltas or [{"content": ""}]
            yield _entry(index, first, logprobs={"content": scored, "refusal": None})
        yield from (_entry(index, delta) for delta in deltas if delta.get("content") != "")


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Content():
            return {"content": piece.text}
        case Reasoning():
            return {"reasoning_content": piece.text, "reasoning": piece.text}
        case CallBegun():
            call = {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
            return {"tool_calls": [{"index": piece.index, **call}]}
        case CallArguments():
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def whole_choice(index: int, entries: Sequence[Entry]) -> Entry:
    """Put one choice together from its entries: a `ChatChoice`, for `whole_json` to write."""
    deltas = [entry["delta"] for entry in entries]
    content = "".join(delta.get("content", "") for delta in deltas)
    thought = "".join(delta.get("reasoning", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for call in (each for delta in deltas for each in delta.get("tool_calls", ())):
        if "id" in call:
            calls.append({"id": call["id"], "type": "function", "function": {**call["function"]}})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
    scored = [entry["logprobs"]["content"] for entry in entries if entry["logprobs"]]
    return {
        "index": index,
        "message": message
        | ({"reasoning_content": thought, "reasoning": thought} if thought else {})
        | ({"tool_calls": calls} if calls else {}),
        "logprobs": {"content": one_list(scored), "refusal": None} if scored else None,
        "finish_reason": entries[-1]["finish_reason"],
    }


def _entry(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> Entry:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
