"""Any server with streamed completions and `/tokenize` but no sessions: the whole history travels each turn."""

from __future__ import annotations

from contextlib import aclosing

from client.edge import mapped_errors
from client.errors import StreamBroken
from loadgen.load.prompts import TokenIds
from loadgen.load.records import TurnCost
from loadgen.load.turn_clock import TurnClock, Wire
from loadgen.targets.base import MODELS, TargetSpec, check_context
from loadgen.targets.dialects import Dialect, OpenAIDialect, find_dialect


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
