"""Agents with sessions, which take turns in every way and do something between them, and clients of OpenAI's API; and
the server that nothing happens to: what that answers is right.
"""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx

from client import AsyncDjinn, AsyncSession, DjinnError
from client.edge import Connection, check_status, mapped_errors
from client.errors import APIError, ConnectionLost, NotFound
from loadgen.errors import LoadgenError
from loadgen.experiments.chaos.hosting import KEYS, HostedServer
from loadgen.experiments.chaos.plan import FIRST_TOKEN, LAST_TOKEN, LONGEST_PROMPT, ChaosPlan, Notes
from loadgen.load.prompts import TokenIds
from loadgen.peers.base import SERVED_NAME
from loadgen.targets.djinn import greedy
from loadgen.targets.tools import SESSION_HEADER, Message


class TwinFailed(LoadgenError):
    """The twin gave no answer: there is nothing to compare with."""


class Mirror:
    """A session on the twin that takes the turns of one agent. It follows every fork, rewind and move."""

    def __init__(self, twin: AsyncDjinn) -> None:
        self._twin = twin
        self._session: AsyncSession | None = None
        self._tokens: TokenIds = ()

    async def answer(self, history: TokenIds, prompt: TokenIds, tokens: int) -> TokenIds:
        """What `tokens` tokens follow `prompt` after `history`. Raises `TwinFailed`."""
        try:
            if self._session is None:
                self._session = await self._twin.sessions.create()
            kept = common(self._tokens, history)
            if kept < len(self._tokens):
                await self._session.rewind(kept)
            new = history[kept:] + prompt
            made = (await self._session.generate(**greedy(new, tokens))).token_ids
        except DjinnError as error:
            raise TwinFailed(f"the twin failed: {error}") from error
        self._tokens = history + prompt + made
        return made

    async def answer_once(self, prompt: TokenIds, tokens: int) -> TokenIds:
        """The same without a history, in a session that closes. Raises `TwinFailed`."""
        made = await self.answer((), prompt, tokens)
        await self.close()
        return made

    async def close(self) -> None:
        """Close its session. Raises `TwinFailed`."""
        if self._session is not None:
            try:
                await self._session.close()
            except DjinnError as error:
                raise TwinFailed(f"the twin failed: {error}") from error


def common(one: TokenIds, other: TokenIds) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


GONE = None
SETTLED_S = 60.0
POLL_S = 0.05


async def settled(session: AsyncSession) -> TokenIds | None:
    """The session's history, once no turn runs in it and no breakpoint is armed; None if it is gone.

    A pause ends as cancelled. Raises `DjinnError`, `ConnectionLost` if its turn goes on for too long.
    """
    deadline = time.monotonic() + SETTLED_S
    try:
        while (info := await session.refresh()).state != "idle":
            if info.state == "paused":
                await session.cancel()
            if time.monotonic() > deadline:
                raise ConnectionLost(f"the turn of a client that is gone is {info.state} after {SETTLED_S:.0f} s")
            await asyncio.sleep(POLL_S)
        await session.clear_breakpoints()
        return (await session.history()).token_ids
    except NotFound:
        return GONE


async def close_strays(djinn: AsyncDjinn, agent: str, kept: AsyncSession | None) -> None:
    """Close the agent's sessions but one: forks and imports whose answer never came. Raises `DjinnError`."""
    strays = [session async for session in djinn.sessions.list() if session.info.metadata.get("agent") == agent]
    for stray in strays:
        if kept is None or stray.id != kept.id:
            await stray.close()


RETRY_S = 0.2
WAIT_S = (0.05, 0.8)
GIVE_UP_S = 120.0
"""How long an agent tries to have its session back."""


class SessionAgent:
    """Takes turns until it is stopped. `tokens` is what its session's history must be."""

    def __init__(
        self, number: int, plan: ChaosPlan, layers: int, djinn: AsyncDjinn, mirror: Mirror, notes: Notes, folder: Path
    ) -> None:
        self.number = number
        self.name = f"agent-{number}"
        self._plan, self._layers, self._djinn, self._mirror, self._notes = plan, layers, djinn, mirror, notes
        self._file = folder / f"{self.name}.safetensors"
        self._choose = random.Random(f"{plan.seed} {number}")
        self._session: AsyncSession | None = None
        self._tokens: TokenIds = ()
        self._prompt: TokenIds | None = None
        """Of the turn whose answer has not come."""
        self._rewinding: int | None = None
        """Where to, while that is not answered."""
        self._turns = {"turn": self._plain, "streamed turn": self._streamed, "paused turn": self._paused}
        self._between = {
            "pause": self._rest,
            "io_wait": self._wait,
            "idle": self._idle,
            "fork": self._fork,
            "move": self._move,
            "rewind": self._rewind,
        }

    async def run(self, stop: asyncio.Event) -> None:
        """Do one thing after the other; after a failure, first find out how the session stands.

        Raises `TwinFailed`.
        """
        while not stop.is_set():
            if self._session is None or len(self._tokens) + self._plan.longest_turn > self._plan.context:
                done = await self._try("open")
            else:
                done = await self._try(self._choose.choice(tuple(self._turns)))
                if done:
                    await self._try(self._choose.choice(tuple(self._between)))
        await self._recover()

    async def _try(self, action: str) -> bool:
        """Run the action. Returns whether it succeeded."""
        sent_s = self._notes.seconds
        try:
            if action in self._turns:
                await self._take_turn(action)
            elif action in self._between:
                await self._between[action]()
            else:
                await self._open()
        except DjinnError as error:
            self._notes.failed(self.name, action, sent_s, error)
            await asyncio.sleep((isinstance(error, APIError) and error.retry_after) or RETRY_S)
            await self._recover()
            return False
        self._notes.findings.actions[action] += 1
        return True

    async def _open(self) -> None:
        """A new session in place of the old one."""
        old, self._session, self._tokens = self._session, None, ()
        if old is not None:
            await old.close()
        self._session = await self._djinn.sessions.create(metadata={"agent": self.name})

    async def _take_turn(self, kind: str) -> None:
        count = self._choose.randint(1, LONGEST_PROMPT)
        self._prompt = tuple(self._choose.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count))
        await self._keep(self._prompt, await self._turns[kind](self._prompt))

    async def _keep(self, prompt: TokenIds, made: TokenIds) -> None:
        """The turn is over: hold its answer beside the twin's."""
        position = len(self._tokens) + len(prompt)
        expected = await self._mirror.answer(self._tokens, prompt, len(made))
        self._notes.compared(self.name, made, expected, tokens=len(made), position=position)
        self._tokens += prompt + made
        self._prompt = None

    async def _plain(self, prompt: TokenIds) -> TokenIds:
        return (await self._its.generate(**greedy(prompt, self._plan.tokens))).token_ids

    async def _streamed(self, prompt: TokenIds) -> TokenIds:
        began, first_s = time.perf_counter(), None
        async with self._its.stream(**greedy(prompt, self._plan.tokens)) as stream:
            async for event in stream:
                if first_s is None and event.token_ids:
                    first_s = time.perf_counter() - began
        if first_s is not None:
            self._notes.findings.first_s.append(first_s)
        return stream.turn.token_ids

    async def _paused(self, prompt: TokenIds) -> TokenIds:
        """It pauses at its first generated token, and is looked at."""
        session = self._its
        await session.break_at(layer=self._choose.randrange(self._layers), when_pass="decode")
        turn = await session.generate(**greedy(prompt, self._plan.tokens))
        if turn.status == "paused":
            await (await session.checkpoint()).read("last")
            if self._choose.random() < 0.5:
                await session.set_phase("io_wait")
            await self._rest()
            turn = await session.resume(until="end")
        await session.clear_breakpoints()
        return turn.token_ids

    async def _rest(self) -> None:
        await asyncio.sleep(self._choose.uniform(*WAIT_S))

    async def _wait(self) -> None:
        """The tool takes as long as was said, or half, or twice that."""
        wait_s = self._choose.uniform(*WAIT_S)
        await self._its.set_phase("io_wait", resume_in_ms=1000 * wait_s)
        await asyncio.sleep(wait_s * self._choose.choice((0.5, 1.0, 2.0)))

    async def _idle(self) -> None:
        await self._its.set_phase("idle")
        await self._rest()

    async def _fork(self) -> None:
        """Go on in the fork."""
        await self._go_on_in(await self._its.fork())

    async def _move(self) -> None:
        """Go on in what comes back from a file."""
        try:
            await self._its.export_to(self._file)
            await self._go_on_in(await self._djinn.sessions.import_from(self._file))
        finally:
            self._file.unlink(missing_ok=True)

    async def _go_on_in(self, other: AsyncSession) -> None:
        old, self._session = self._its, other
        await old.close()

    async def _rewind(self) -> None:
        self._rewinding = self._choose.randint(0, len(self._tokens))
        await self._its.rewind(self._rewinding)
        self._tokens, self._rewinding = self._tokens[: self._rewinding], None

    @property
    def told(self) -> tuple[str, TokenIds] | None:
        """Its session's id, and what must be its history; None while it has no session."""
        return None if self._session is None else (self._session.id, self._tokens)

    @property
    def _its(self) -> AsyncSession:
        assert self._session is not None
        return self._session

    async def _recover(self) -> None:
        """Find out what the session's history is, and close what was opened but never told."""
        deadline = self._notes.seconds + GIVE_UP_S
        while True:
            sent_s = self._notes.seconds
            try:
                await close_strays(self._djinn, self.name, self._session)
                if self._session is not None:
                    await self._stand(await settled(self._session))
                return
            except DjinnError as error:
                self._notes.failed(self.name, "recovery", sent_s, error)
                if self._notes.seconds > deadline:
                    self._give_up("the session did not come back")
                    return
                await asyncio.sleep(RETRY_S)

    async def _stand(self, history: TokenIds | None) -> None:
        """Go on from what the server has, if that can be: None is a session that is gone."""
        if history == GONE:
            self._give_up("the session is gone")
        elif self._rewinding is not None and history == self._tokens[: self._rewinding]:
            self._tokens = history
        elif history != self._tokens:
            await self._finish(history)
        self._prompt = self._rewinding = None

    async def _finish(self, history: TokenIds) -> None:
        """The turn whose answer did not come has left its tokens, or some."""
        prompt, known = self._prompt or (), len(self._tokens)
        new = history[known:]
        if history[:known] != self._tokens or new[: len(prompt)] != prompt[: len(new)] or not prompt:
            self._give_up(f"a history of {known} tokens came back as another one of {len(history)}")
        elif len(new) < len(prompt):
            await self._its.rewind(known)
        else:
            await self._keep(prompt, new[len(prompt) :])

    def _give_up(self, why: str) -> None:
        """Begin anew."""
        self._notes.lost(self.name, "recovery", why)
        self._session = None


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
