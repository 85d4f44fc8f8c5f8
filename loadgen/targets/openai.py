"""Any server with streamed completions and `/tokenize` but no sessions: the whole history travels each turn. How such
servers differ is found out by asking, not by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from httpx_sse import ServerSentEvent
from pydantic import BaseModel, ValidationError

from client.calls import Call
from client.edge import mapped_errors
from client.errors import BadRequest, InvalidAnswer, NotFound, StreamBroken, Unprocessable, error_from_event
from client.transport import AsyncTransport
from loadgen.errors import LoadgenError
from loadgen.load.clocks import TurnClock, Wire
from loadgen.load.prompts import TokenIds
from loadgen.load.records import TurnCost
from loadgen.targets.base import MODELS, TargetSpec, check_context, read_tokens, tokenize_call

DONE = "[DONE]"

Chunk = TypeVar("Chunk", bound=BaseModel)


class Decoder(Protocol):
    """Fed the events of a completion in order, collects its text, its cost, and its token ids if they are all told."""

    @property
    def text(self) -> str:
        """What was generated."""
        ...

    @property
    def token_ids(self) -> TokenIds:
        """The same as tokens; empty if the server does not tell them."""
        ...

    def feed(self, event: ServerSentEvent) -> bool:
        """Take one event; whether it brought tokens. Raises the error in it, or `InvalidAnswer`."""
        ...

    def cost(self) -> TurnCost:
        """What the turn cost. Raises `StreamBroken` if the completion did not end, `InvalidAnswer` without usage."""
        ...


class _Choice(BaseModel):
    text: str = ""
    token_ids: tuple[int, ...] | None = None


class _PromptDetails(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(BaseModel):
    choices: tuple[_Choice, ...] = ()


class _Last(BaseModel):
    usage: _Usage | None = None
    error: object = None


class CompletionEnd:
    """How an OpenAI stream tells its usage, its errors and its end."""

    def __init__(self) -> None:
        self._usage: _Usage | None = None
        self._done = False

    def feed(self, event: ServerSentEvent) -> bool:
        """Take one event; whether it is the end. Raises the error in it, or `InvalidAnswer`."""
        if event.data == DONE:
            self._done = True
            return True
        last = read_chunk(event, _Last)
        if last.error is not None:
            raise error_from_event(event.data, request_id=None)
        self._usage = last.usage or self._usage
        return False

    def cost(self) -> TurnCost:
        """What the turn cost. Raises `StreamBroken` if the stream did not end, `InvalidAnswer` without usage."""
        if not self._done:
            raise StreamBroken("the stream ended before the completion did")
        if self._usage is None:
            raise InvalidAnswer("the completion came without usage")
        details = self._usage.prompt_tokens_details
        return TurnCost(
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
            recomputed_tokens=None,
        )


class CompletionDecoder:
    """OpenAI's completions."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: TokenIds = ()
        self._end = CompletionEnd()

    def feed(self, event: ServerSentEvent) -> bool:
        if self._end.feed(event):
            return False
        chunk = read_chunk(event, _Chunk)
        for choice in chunk.choices:
            self.text += choice.text
            self.token_ids += choice.token_ids or ()
        return any(choice.text or choice.token_ids for choice in chunk.choices)

    def cost(self) -> TurnCost:
        return self._end.cost()


def read_chunk(event: ServerSentEvent, kind: type[Chunk]) -> Chunk:
    """The event as JSON of that kind. Raises `InvalidAnswer`."""
    try:
        return kind.model_validate_json(event.data)
    except ValidationError as error:
        raise InvalidAnswer(f"not a chunk of a completion: {event.data[:200]}") from error


class _Timings(BaseModel):
    cache_n: int


class _LlamaCppChunk(BaseModel):
    content: str = ""
    tokens: tuple[int, ...] = ()
    stop: bool = False
    tokens_evaluated: int = 0
    tokens_predicted: int = 0
    timings: _Timings | None = None
    error: object = None


class LlamaCppDecoder:
    """llama.cpp's own completions, of which the last chunk counts what was done."""

    def __init__(self) -> None:
        self.text = ""
        self._ids: TokenIds = ()
        self._last: _LlamaCppChunk | None = None

    @property
    def token_ids(self) -> TokenIds:
        """The ids if they are all there: it never tells those that end inside a UTF-8 character."""
        complete = self._last is not None and len(self._ids) == self._last.tokens_predicted
        return self._ids if complete else ()

    def feed(self, event: ServerSentEvent) -> bool:
        chunk = read_chunk(event, _LlamaCppChunk)
        if chunk.error is not None:
            raise error_from_event(event.data, request_id=None)
        self.text += chunk.content
        self._ids += chunk.tokens
        if chunk.stop:
            self._last = chunk
        return bool(chunk.content or chunk.tokens)

    def cost(self) -> TurnCost:
        if self._last is None:
            raise StreamBroken("the stream ended before the completion did")
        return TurnCost(
            prompt_tokens=self._last.tokens_evaluated,
            completion_tokens=self._last.tokens_predicted,
            cached_tokens=None if self._last.timings is None else self._last.timings.cache_n,
            recomputed_tokens=None,
        )


PROBE = "Hello"
TELL_TOKEN_IDS = {"return_token_ids": True}
REFUSALS = (BadRequest, NotFound, Unprocessable)


class Dialect(Protocol):
    """What is sent to a server, and how its answer is read."""

    def tokenize(self, text: str, special: bool) -> Call[TokenIds]:
        """The ids of `text`, with special tokens in front if `special`."""
        ...

    def completion(self, prompt: TokenIds, completion_tokens: int) -> Call[bytes]:
        """A streamed, greedy completion of exactly `completion_tokens`."""
        ...

    def decoder(self) -> Decoder:
        """For the events of one completion."""
        ...


@dataclass(frozen=True, slots=True)
class OpenAIDialect:
    """OpenAI's completions of `model` and vLLM's `/tokenize`; `extras` go with every completion."""

    model: str
    extras: Mapping[str, Any] = field(default_factory=dict)

    def tokenize(self, text: str, special: bool) -> Call[TokenIds]:
        return tokenize_call(text, special, self.model)

    def completion(self, prompt: TokenIds, completion_tokens: int) -> Call[bytes]:
        """See `Dialect`. `ignore_eos` is an extension that vLLM began."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": completion_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extras,
        }
        return Call("POST", "/v1/completions", bytes, json=body)

    def decoder(self) -> Decoder:
        return CompletionDecoder()


@dataclass(frozen=True, slots=True)
class LlamaCppDialect:
    """llama.cpp's own `/completion`: unlike its `/v1/completions` it tells token ids."""

    def tokenize(self, text: str, special: bool) -> Call[TokenIds]:
        return Call("POST", "/tokenize", read_tokens, json={"content": text, "add_special": special})

    def completion(self, prompt: TokenIds, completion_tokens: int) -> Call[bytes]:
        body = {
            "prompt": prompt,
            "n_predict": completion_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
        }
        return Call("POST", "/completion", bytes, json=body)

    def decoder(self) -> Decoder:
        return LlamaCppDecoder()


async def find_dialect(spec: TargetSpec, model: str, transport: AsyncTransport) -> Dialect:
    """The dialect in which the server answers. Raises `LoadgenError` if there is none, `client.DjinnError`."""
    plain = OpenAIDialect(model)
    for dialect in (plain, LlamaCppDialect()):
        with suppress(*REFUSALS):
            if await transport.send(dialect.tokenize(PROBE, False)):
                return await _with_token_ids(plain, transport) if dialect is plain else dialect
    raise LoadgenError(f"target {spec.name} has no /tokenize as vLLM or llama.cpp have it")


async def _with_token_ids(plain: OpenAIDialect, transport: AsyncTransport) -> OpenAIDialect:
    """Ask for the ids of generated tokens, as vLLM tells them, unless the server refuses to."""
    probe = {"model": plain.model, "prompt": PROBE, "max_tokens": 1, **TELL_TOKEN_IDS}
    with suppress(*REFUSALS):
        await transport.send(Call("POST", "/v1/completions", bytes, json=probe))
        return OpenAIDialect(plain.model, TELL_TOKEN_IDS)
    return plain


class OpenAITarget:
    """A server that runs `model` and keeps no sessions. `prepare` it first."""

    def __init__(self, spec: TargetSpec, model: str) -> None:
        self.spec = spec
        self.transport = spec.transport()
        self.dialect: Dialect = OpenAIDialect(model)
        self._model = model

    async def prepare(self, tokens: int) -> None:
        """See `Target`. Also finds out what dialect the server speaks."""
        check_context(self.spec, await self.transport.send(MODELS), tokens)
        self.dialect = await find_dialect(self.spec, self._model, self.transport)

    async def tokenize(self, text: str, special: bool) -> TokenIds:
        return await self.transport.send(self.dialect.tokenize(text, special))

    def new_agent(self) -> OpenAIAgent:
        """An agent of which the server learns with its first turn."""
        return OpenAIAgent(self)

    async def close(self) -> None:
        """Close every connection."""
        await self.transport.close()


class OpenAIAgent:
    """An agent that keeps the history which the server does not, on a connection of its own."""

    is_exact = True

    def __init__(self, target: OpenAITarget) -> None:
        self._target = target
        self._wire = Wire()
        self._transport = target.spec.transport(self._wire.trace)
        self._history: TokenIds = ()

    async def run_turn(self, new_ids: TokenIds, completion_tokens: int, clock: TurnClock) -> TurnCost:
        """Send the whole history and the new tokens, and read the chunks of the completion."""
        self._wire.clock = clock
        prompt = self._history + new_ids
        completion = self._target.dialect.decoder()
        call = self._target.dialect.completion(prompt, completion_tokens)
        async with self._transport.stream(call) as source:
            with mapped_errors(lost=StreamBroken):
                async with aclosing(source.aiter_sse()) as events:
                    async for event in events:
                        if completion.feed(event):
                            clock.tokens()
        clock.over()
        cost = completion.cost()
        self._history = prompt + (completion.token_ids or await self._encode(completion.text))
        return cost

    async def _encode(self, text: str) -> TokenIds:
        """What the server makes of its own text: the best that can be known where it does not tell the ids."""
        return await self._target.tokenize(text, False)

    async def leave(self, away_s: float | None) -> None:
        """There is no way to tell."""

    async def come_back(self) -> None:
        """There is no way to tell."""

    async def close(self) -> None:
        """Close the connection: the server does not know the conversation."""
        await self._transport.close()
