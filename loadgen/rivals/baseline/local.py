"""The model in this process, with static batching: requests that wait when a batch is done form the next one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from loadgen.rivals.baseline.model import CausalModel
from loadgen.rivals.baseline.requests import Job, Ticket

MAX_BATCH = 8
"""Larger batches make those who come next wait longer than they gain."""


class LocalGenerator:
    """One queue, first come first served, and one batch at a time in a thread."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._queue: asyncio.Queue[Ticket] = asyncio.Queue()
        self._worker = asyncio.create_task(self._work())

    async def stream(self, job: Job) -> AsyncGenerator[int]:
        """The generated tokens as they come, after those before it. A job whose reader left before its turn is skipped.
        Raises `GenerationFailed`.
        """
        ticket = Ticket(job)
        self._queue.put_nowait(ticket)
        async with aclosing(ticket.read()) as tokens:
            async for token in tokens:
                yield token

    async def close(self) -> None:
        """Take no more jobs."""
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            waiting = [await self._queue.get()]
            while len(waiting) < MAX_BATCH and not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            if batch := [ticket for ticket in waiting if not ticket.abandoned]:
                await self._run(batch)

    async def _run(self, batch: list[Ticket]) -> None:
        loop = asyncio.get_running_loop()

        def on_token(index: int, token: int) -> None:
            loop.call_soon_threadsafe(batch[index].tokens.put_nowait, token)

        end: Exception | None = None
        try:
            await asyncio.to_thread(self._model.generate, [ticket.job for ticket in batch], on_token)
        except Exception as error:  # whatever it is, those who wait must hear of it, and the next batch may do better
            end = error
        for ticket in batch:
            ticket.tokens.put_nowait(end)
