"""Chats whose turns end with a call of a tool: agents as they are, and the same agents with Djinn's signals."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Any
from uuid import uuid4

from httpx_sse import ServerSentEvent
from pydantic import BaseModel

from client import AsyncSession, AsyncSessions
from client.calls import Call
from client.edge import mapped_errors
from client.errors import InvalidAnswer, StreamBroken
from loadgen.load.clocks import TurnClock, Wire
from loadgen.load.prompts import TokenIds
from loadgen.load.records import TurnCost
from loadgen.load.workload import Signals
from loadgen.targets.base import MODELS, TargetSpec, check_context, tokenize_call
from loadgen.targets.djinn import signal_leave, signal_return
from loadgen.targets.openai import CompletionEnd, read_chunk

TOOL_NAME = "note"
CALL_TOKENS = 26
"""About how many tokens a call has beside its text."""
SESSION_HEADER = "X-Session-ID"
"""Names the session of an answer of Djinn's."""

Message = dict[str, Any]


class ToolTarget:
    """A server that runs `model` and takes tools. Its agents name themselves by `prompt_cache_key` only, as agents do,
    and signal in the way of `signals`.
    """

    def __init__(self, spec: TargetSpec, model: str, signals: Signals) -> None:
        self.spec = spec
        self.model = model
        self.signals = signals
        self.transport = spec.transport()

    async def prepare(self, tokens: int) -> None:
        check_context(self.spec, await self.transport.send(MODELS), tokens)

    async def tokenize(self, text: str, special: bool) -> TokenIds:
        return await self.transport.send(tokenize_call(text, special, self.model))

    def new_agent(self) -> ToolAgent:
        """An agent of which the server learns with its first turn."""
        return ToolAgent(self)

    async def close(self) -> None:
        """Close every connection."""
        await self.transport.close()


class ToolAgent:
    """An agent whose every turn calls the same tool; the tool's answer begins its next turn.

    How many tokens a call has is the model's affair: `completion_tokens` decides the text that it must write.
    """

    is_exact = False

    def __init__(self, target: ToolTarget) -> None:
        self._target = target
        self._wire = Wire()
        self._transport = target.spec.transport(self._wire.trace)
        self._messages: list[Message] = []
        self._key = uuid4().hex
        self._session: AsyncSession | None = None

    async def run_turn(self, new_ids: TokenIds, completion_tokens: int, clock: TurnClock) -> TurnCost:
        """Send the whole chat with the text of `new_ids`, and read the call that answers it."""
        self._messages.append(self._next_message(await self._target.transport.send(detokenize_call(new_ids))))
        self._wire.clock = clock
        answer = ToolCallDecoder()
        async with self._transport.stream(self._call(completion_tokens)) as source:
            with mapped_errors(lost=StreamBroken):
                async with aclosing(source.aiter_sse()) as events:
                    async for event in events:
                        if answer.feed(event):
                            clock.tokens()
            session_id = source.response.headers.get(SESSION_HEADER)
        clock.over()
        cost = answer.cost()
        self._messages.append(answer.message())
        if session_id is None:
            return cost
        self._session = await AsyncSessions(self._transport).get(session_id)
        return replace(cost, resume_ms=self._session.info.usage.resume_ms.model_dump())

    def _next_message(self, text: str) -> Message:
        if not self._messages:
            return {"role": "user", "content": text}
        return {"role": "tool", "tool_call_id": self._messages[-1]["tool_calls"][0]["id"], "content": text}

    def _call(self, completion_tokens: int) -> Call[bytes]:
        note = " ".join(["and"] * max(1, completion_tokens - CALL_TOKENS))
        properties = {"text": {"const": note}}
        schema = {"type": "object", "properties": properties, "required": ["text"], "additionalProperties": False}
        body = {
            "model": self._target.model,
            "messages": self._messages,
            "tools": [{"type": "function", "function": {"name": TOOL_NAME, "parameters": schema}}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "prompt_cache_key": self._key,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Call("POST", "/v1/chat/completions", bytes, json=body)

    async def leave(self, away_s: float | None) -> str | None:
        """Signal as `DjinnAgent` does. Without signals the server sees for itself that a tool is called."""
        return await signal_leave(self._session, self._target.signals, away_s)

    async def come_back(self) -> str | None:
        """Signal as `DjinnAgent` does. Without signals the next call says so."""
        return await signal_return(self._session, self._target.signals)

    async def close(self) -> None:
        """Close the connection: a client of OpenAI's API has no way to end a conversation."""
        await self._transport.close()


class _Text(BaseModel):
    prompt: str


def detokenize_call(token_ids: TokenIds) -> Call[str]:
    """`POST /detokenize`, which vLLM and Djinn both have."""
    return Call("POST", "/detokenize", _read_text, json={"tokens": token_ids})


def _read_text(answer: bytes) -> str:
    return _Text.model_validate_json(answer).prompt


class _Function(BaseModel):
    name: str = ""
    arguments: str = ""


class _CallDelta(BaseModel):
    id: str | None = None
    function: _Function


class _Delta(BaseModel):
    role: str | None = None
    content: str | None = None
    tool_calls: tuple[_CallDelta, ...] = ()


class _Choice(BaseModel):
    delta: _Delta
    finish_reason: str | None = None


class _Chunk(BaseModel):
    choices: tuple[_Choice, ...] = ()


class ToolCallDecoder:
    """The events of an answer that is one call."""

    def __init__(self) -> None:
        self._end = CompletionEnd()
        self._id: str | None = None
        self._arguments = ""
        self._finish_reason: str | None = None

    def feed(self, event: ServerSentEvent) -> bool:
        """Take one event; whether it brought tokens, as all do but the last. Raises its error, or `InvalidAnswer`."""
        if self._end.feed(event):
            return False
        choices = read_chunk(event, _Chunk).choices
        for choice in choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            for call in choice.delta.tool_calls:
                self._id = call.id or self._id
                self._arguments += call.function.arguments
        return any(choice.finish_reason is None for choice in choices)

    def cost(self) -> TurnCost:
        """What the turn cost. Raises `StreamBroken` if it did not end, `InvalidAnswer` if it is no call."""
        cost = self._end.cost()
        if self._id is None or self._finish_reason != "tool_calls":
            raise InvalidAnswer(f"the answer ended with {self._finish_reason} instead of a call")
        return cost

    def message(self) -> Message:
        """The answer as it is sent back."""
        function = {"name": TOOL_NAME, "arguments": self._arguments}
        calls = [{"id": self._id, "type": "function", "function": function}]
        return {"role": "assistant", "content": None, "tool_calls": calls}
