"""An agent that is a client of OpenAI's API: chats whose every answer calls a tool, bound to a session by a header."""

import asyncio
import random
from typing import Any

import httpx

from client import DjinnError
from client.edge import Connection, check_status, mapped_errors
from client.errors import APIError
from loadgen.experiments.chaos.agent import RETRY_S, WAIT_S
from loadgen.experiments.chaos.hosting import KEYS, HostedServer
from loadgen.experiments.chaos.notes import Notes
from loadgen.experiments.chaos.plan import ChaosPlan
from loadgen.experiments.chaos.twin import TwinFailed
from loadgen.peers.base import SERVED_NAME
from loadgen.targets.tools import SESSION_HEADER, Message

CALLS = 3
"""Of a chat, before another begins in the same session."""
MOST_TOKENS = 128
TIMEOUT_S = 90.0
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Accra", "Bern")
TOOL = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": CITIES}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}


class ChatAgent:
    """Sends the whole chat each time, to the server with its session's name and to the twin without."""

    def __init__(self, number: int, plan: ChaosPlan, server: HostedServer, twin: HostedServer, notes: Notes) -> None:
        self.name = f"chat-{number}"
        self._notes = notes
        self._choose = random.Random(f"{plan.seed} {number}")
        self._http = httpx.AsyncClient(**Connection(server.url, KEYS[number % len(KEYS)], TIMEOUT_S).options())
        self._twin = httpx.AsyncClient(**Connection(twin.url, None, TIMEOUT_S).options())
        self._messages: list[Message] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Call after call; one that fails is repeated. Raises `TwinFailed`."""
        try:
            while not stop.is_set():
                self._say()
                await self._answered(stop)
                await asyncio.sleep(self._choose.uniform(*WAIT_S))
        finally:
            await self._http.aclose()
            await self._twin.aclose()

    def _say(self) -> None:
        """The user's first message, or what the tool answers."""
        text = " ".join(self._choose.choice(CITIES) for _ in range(self._choose.randint(1, 5)))
        if len(self._messages) >= 2 * CALLS:
            self._messages = []
        if not self._messages:
            self._messages.append({"role": "user", "content": text})
        else:
            call = self._messages[-1]["tool_calls"][0]["id"]
            self._messages.append({"role": "tool", "tool_call_id": call, "content": text})

    async def _answered(self, stop: asyncio.Event) -> None:
        """Ask until there is an answer, and hold it beside the twin's."""
        while not stop.is_set():
            sent_s = self._notes.seconds
            try:
                answer = await self._ask(self._http, {SESSION_HEADER: self.name})
            except DjinnError as error:
                self._notes.failed(self.name, "chat", sent_s, error)
                await asyncio.sleep((isinstance(error, APIError) and error.retry_after) or RETRY_S)
                continue
            try:
                expected = await self._ask(self._twin, {})
            except DjinnError as error:
                raise TwinFailed(f"the twin failed: {error}") from error
            tokens = answer["usage"]["completion_tokens"]
            self._notes.compared(self.name, called(answer), called(expected), tokens=tokens)
            self._notes.findings.actions["chat"] += 1
            message = answer["choices"][0]["message"]
            self._messages = [*self._messages, message] if message.get("tool_calls") else []
            return

    async def _ask(self, http: httpx.AsyncClient, headers: dict[str, str]) -> dict[str, Any]:
        body = {
            "model": SERVED_NAME,
            "messages": self._messages,
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_tokens": MOST_TOKENS,
        }
        with mapped_errors():
            response = await http.post("/v1/chat/completions", json=body, headers=headers)
        check_status(response)
        found: dict[str, Any] = response.json()
        return found


def called(answer: dict[str, Any]) -> str:
    """What an answer says, without the ids that the server makes up."""
    choice = answer["choices"][0]
    functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    words = [f"{function['name']}({function['arguments']})" for function in functions]
    return " ".join([choice["finish_reason"], *words])
