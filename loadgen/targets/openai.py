"""Any server with OpenAI's streamed completions and `/tokenize`: the whole history travels each turn."""

from __future__ import annotations

from contextlib import aclosing, suppress
from typing import Any

from client.calls import Call
from client.edge import mapped_errors
from client.errors import BadRequest, StreamBroken, Unprocessable
from loadgen.prompts import TokenIds
from loadgen.records import TurnClock, TurnCost
from loadgen.targets.base import MODELS, TargetSpec, check_context, tokenize_call
from loadgen.targets.completion import CompletionDecoder

PATH = "/v1/completions"
TELL_TOKEN_IDS = {"return_token_ids": True}


class OpenAITarget:
    """An OpenAI-compatible server that runs `model`."""

    def __init__(self, spec: TargetSpec, model: str) -> None:
        self.spec = spec
        self.transport = spec.transport()
        self._model = model
        self._extras: dict[str, Any] = {}

    async def prepare(self, tokens: int) -> None:
        """See `Target`. Asks for the ids of generated tokens, as vLLM tells them, unless the server refuses to."""
        check_context(self.spec, await self.transport.send(MODELS), tokens)
        probe = {"model": self._model, "prompt": "Hello", "max_tokens": 1, **TELL_TOKEN_IDS}
        with suppress(BadRequest, Unprocessable):
            await self.transport.send(Call("POST", PATH, bytes, json=probe))
            self._extras = TELL_TOKEN_IDS

    def completion(self, prompt: TokenIds, completion_tokens: int) -> Call[bytes]:
        """A streamed completion of exactly `completion_tokens`; `ignore_eos` is an extension that vLLM began."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": completion_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extras,
        }
        return Call("POST", PATH, bytes, json=body)

    async def tokenize(self, text: str, special: bool) -> TokenIds:
        """See `Target`."""
        return await self.transport.send(tokenize_call(text, special, self._model))

    def new_agent(self) -> OpenAIAgent:
        """An agent of which the server learns with its first turn."""
        return OpenAIAgent(self)

    async def close(self) -> None:
        """Close every connection."""
        await self.transport.close()


class OpenAIAgent:
    """An agent that keeps the history which the server does not."""

    def __init__(self, target: OpenAITarget) -> None:
        self._target = target
        self._history: TokenIds = ()

    async def run_turn(self, new_ids: TokenIds, completion_tokens: int, clock: TurnClock) -> TurnCost:
        """Send the whole history and the new tokens, and read the chunks of the completion."""
        prompt = self._history + new_ids
        completion = CompletionDecoder()
        async with self._target.transport.stream(self._target.completion(prompt, completion_tokens)) as source:
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

    async def leave(self, think_s: float) -> None:
        """There is no way to tell."""

    async def come_back(self) -> None:
        """There is no way to tell."""

    async def close(self) -> None:
        """There is nothing to close: the server does not know the conversation."""
