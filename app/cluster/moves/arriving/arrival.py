"""One session on its way from another server: what is known of it, and what the engine receives of it."""

from __future__ import annotations

import asyncio
import socket
from array import array
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from app.cluster.moves.arriving.opening import Opening
from app.cluster.moves.giving import give
from app.cluster.moves.key import new_nonce
from app.cluster.moves.wire import Answer, Offer
from app.domain.values import SessionId
from app.engine_process.executor import EngineExecutor
from app.messages import ReceiveKV


class GivenUp(Exception):
    """The session does not come."""


@dataclass(slots=True, eq=False)
class Arrival:
    """One session on its way here."""

    offer: Offer
    opening: Opening
    received: asyncio.Task[None] | None = None
    """Ends when the engine has the session, or has not got it."""
    committing: asyncio.Task[Answer] | None = None
    """Set once the old home has said that the session may be taken."""
    losses: int = 0
    """Of engines, when one was told to receive the session."""
    word: str = field(default_factory=new_nonce)
    """What only the old home has heard: who repeats its messages later has not."""
    timer: asyncio.TimerHandle | None = None
    place: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Its place among the sessions that may be open, while it is on its way."""

    async def leave(self, error: BaseException) -> None:
        """Give up its place."""
        if self.timer is not None:
            self.timer.cancel()
        await self.place.__aexit__(type(error), error, None)

    @property
    def session(self) -> SessionId:
        """Its id."""
        return self.offer.record.id

    @property
    def has_failed(self) -> bool:
        """Whether it has not come, and never will."""
        task = self.received
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    async def receive(self, executor: EngineExecutor, connection: socket.socket) -> None:
        """Return when the engine has received the session over the connection. Raises why it has not."""
        number = give(executor, connection)
        self.losses = executor.losses
        await executor.call(
            lambda ticket: ReceiveKV(
                ticket,
                self.session,
                number,
                self.offer.record.owner or "",
                self.offer.record.residency,
                tuple(array("I", self.offer.history)),
                self.opening.computed_with,
                self.offer.record.namespace,
                self.offer.record.adapter_digest or "",
            )
        )

    async def came(self) -> None:
        """Return when the engine has the session. Raises why it has not."""
        assert self.received is not None
        await asyncio.shield(self.received)
