"""The turns behind one call: `n` choices for each prompt, run at the same time, their items merged as they come."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace

from app.domain.errors import Draining, TurnCancelled
from app.domain.values import FinishReason
from app.messages import TurnFinished
from app.sessions.charges import TurnCharge
from app.sessions.keyed import KeyedRequest
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.sessions.turns import TurnRequest
from app.text.generation import TextChunk, TextItem, TurnReader
from app.wire.turns import MAX_SEED

STARTED_AT_ONCE = 16
"""Turns that a call starts before others have their turn of the event loop: of long prompts each takes half a
millisecond.
"""
OpenSession = Callable[[], AbstractAsyncContextManager[Session]]


class Choices:
    """Runs `n` turns for each of `requests`. Choice `index` is number `index % n` of prompt `index // n`.

    Every choice has a session of its own. The first of a prompt computes it; the others are submitted once it has, so
    they find all full blocks of the prompt in the prefix cache. A fork of the first would share the last, partly
    filled block too, but the first is generating by then, and only idle sessions can be forked.
    """

    def __init__(
        self,
        registry: SessionRegistry,
        requests: Sequence[TurnRequest],
        n: int,
        charges: Sequence[TurnCharge],
        open_session: OpenSession,
        cleanup: AsyncExitStack,
        keyed: KeyedRequest | None = None,
    ) -> None:
        """`charges` are what has been reserved for each choice. `cleanup` ends what still runs and closes the sessions.
        It is unwound once every choice has finished, and must be when its reader has gone. `keyed` is the call, if it
        has an `Idempotency-Key`.
        """
        self._registry = registry
        self._requests = requests
        self._n = n
        self._open_session = open_session
        self._cleanup = cleanup
        self._keyed = keyed
        self._merged: asyncio.Queue[tuple[int, TextItem | Exception]] = asyncio.Queue(maxsize=1)
        self._only: TurnReader | None = None
        """That of the only choice, which is merged with nothing."""
        self._sessions: list[Session] = []
        self._charges = charges
        self._to_finish = len(requests) * n

    async def start(self) -> None:
        """Open every session, then submit the first choice of every prompt.

        Raises what `SessionRegistry` raises. Of choices that have begun before a `Busy`, nothing is left once `cleanup`
        unwinds.
        """
        for _ in range(self._to_finish):
            self._sessions.append(await self._cleanup.enter_async_context(self._open_session()))
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
