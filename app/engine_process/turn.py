"""A turn between the engine's events and its reader: what waits is bounded in items, and nothing of it is lost."""

from __future__ import annotations

import asyncio
from collections import deque

from app.domain.errors import DjinnError
from app.domain.values import Ticket, TokenLogprobs
from app.messages import Failed, Paused, PromptScored, Reading, Started, Token, TurnEvent, TurnFinished

SLICE = 128
"""Tokens that a reader gets at a time: five milliseconds until they are written, with 20 alternatives each."""


class TokenRun:
    """Generated tokens that the reader has not seen yet, in order. Those of a slow reader wait as one run."""

    __slots__ = ("logprobs", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []

    def add(self, token: Token) -> None:
        """Append one token; `logprobs` stays empty unless the turn asked for it."""
        self.token_ids.append(token.token_id)
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)

    def cut(self, count: int) -> TokenRun:
        """Take the first `count` tokens out."""
        first = TokenRun()
        first.token_ids, self.token_ids = self.token_ids[:count], self.token_ids[count:]
        first.logprobs, self.logprobs = self.logprobs[:count], self.logprobs[count:]
        return first


TurnItem = Started | PromptScored | Reading | TokenRun | Paused | TurnFinished


class Turn:
    """One turn as its reader sees it: iterate to get its items, the last of which is `TurnFinished`. It may pause any
    number of times before: after a `Paused`, nothing comes until it is resumed. Used on the event loop only.

    Few items ever wait here: tokens that arrive while tokens wait join the same `TokenRun`, a turn has one
    `PromptScored` and one end, and one `Started` and one `Paused` for each time that it is resumed. A turn's own
    `max_tokens` bounds the bytes.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        """That of the last `Submit` or `Resume`."""
        self.readers = 1
        """Calls that wait for it: the one that started it, and those that resumed it."""
        self.ending = False
        """Whether a `Cancel` is on its way: however the engine stops meanwhile, the end follows."""
        self.ended = asyncio.Event()
        """Set when the engine has given the terminal event, whether or not anyone has read it."""
        self.failed = False
        """Whether that was a `Failed`: the session is as before the turn."""
        self._unread: deque[TurnItem | DjinnError] = deque()
        self._filled = asyncio.Event()
        self._was_cut = False
        """Whether what comes next is the rest of a run."""

    def deliver(self, event: TurnEvent) -> None:
        """Take one event from the executor. Never blocks."""
        if isinstance(event, Paused) and self.ending:
            return
        if isinstance(event, Token):
            if not self._unread or not isinstance(self._unread[-1], TokenRun):
                self._unread.append(TokenRun())
            run = self._unread[-1]
            assert isinstance(run, TokenRun)
            run.add(event)
        elif isinstance(event, Failed):
            self._unread.append(event.error)
        else:
            self._unread.append(event)
        self._filled.set()
        if isinstance(event, TurnFinished | Failed):
            self.failed = isinstance(event, Failed)
            self.ended.set()

    @property
    def unread_logprobs(self) -> list[TokenLogprobs]:
        """Those of the tokens that wait to be read."""
        return [found for item in self._unread if isinstance(item, TokenRun) for found in item.logprobs]

    def __aiter__(self) -> Turn:
        return self

    async def __anext__(self) -> TurnItem:
        """Wait for the next item: `SLICE` tokens of a run at most, and others have turns of the event loop before the
        rest of it. Raises the error of a turn that failed, and goes on to.
        """
        if self._was_cut:
            self._was_cut = False
            await asyncio.sleep(0)
        while not self._unread:
            if self.ended.is_set():
                raise StopAsyncIteration
            self._filled.clear()
            await self._filled.wait()
        item = self._unread[0]
        if isinstance(item, DjinnError):
            raise item
        if isinstance(item, TokenRun) and len(item.token_ids) > SLICE:
            self._was_cut = True
            return item.cut(SLICE)
        self._unread.popleft()
        return item
