"""Sessions that come from other servers: offered, received by the engine, taken when the old home says so."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any

from app.cluster.moves.arrival import Arrival, GivenUp, Opening, require_absent, require_same_model, require_tenant
from app.cluster.moves.bindings import Bindings
from app.cluster.moves.wire import Answer, Offer, Question
from app.domain.errors import (
    Busy,
    DiskShort,
    DjinnError,
    Draining,
    EngineAway,
    EngineRestarting,
    JournalUnavailable,
    Moving,
    NameTaken,
    NotDurable,
    PeerFull,
    PeerMismatch,
)
from app.domain.homes import Taken
from app.domain.values import SessionState
from app.sessions.lifecycle import reopen_late
from app.sessions.registry import SessionRegistry
from app.tenants.tenant import Directory

logger = logging.getLogger(__name__)

WAIT_S = 60.0
"""How long a session that has come is kept for an old home that says nothing."""
FULL = (Busy, Draining, DiskShort, JournalUnavailable, EngineAway, NotDurable)
"""What has nothing to do with the session itself."""


class Arrivals:
    """Used on the event loop only."""

    def __init__(self, registry: SessionRegistry, directory: Directory, bindings: Bindings) -> None:
        self._registry = registry
        self._bindings = bindings
        self._homes = registry.keeper.homes
        self._directory = directory
        self._coming: dict[str, Arrival] = {}
        self._ends = set[asyncio.Task[Any]]()

    @property
    def count(self) -> int:
        """The server's count of moves, as the old home is told it."""
        return self._homes.seq

    @property
    def journal(self) -> str:
        """The UUID of the journal that will say whether a session has been taken."""
        identity = self._registry.keeper.identity
        return "" if identity is None else identity.uuid

    async def offer(self, offer: Offer) -> Arrival:
        """Take note of a session that is offered. Raises `PeerFull`, `PeerMismatch`, `NameTaken`."""
        require_same_model(offer, self._registry)
        try:
            return await self._note(offer)
        except FULL as error:
            raise PeerFull(error.message) from error
        except (PeerFull, PeerMismatch, NameTaken, Moving):
            raise
        except Exception as error:  # the other server may be of any version
            raise PeerMismatch(f"the session cannot be opened here: {error}") from error

    async def _note(self, offer: Offer) -> Arrival:
        session = offer.record.id
        require_tenant(offer, self._registry, self._directory)
        responses = [response for response, _ in offer.binding.responses]
        await self._registry.keeper.settled_id(session, responses)  # what is left of it from before
        opening = await asyncio.to_thread(Opening.of, self._registry, offer)
        for other in [each for each in self._coming.values() if each.session == session and each.has_failed]:
            await self._end(self._coming.pop(other.offer.token))
        require_absent(offer, self._registry, self._coming)
        arrival = Arrival(offer, opening)
        try:
            arrival.place.enter_context(self._bindings.expecting(opening.brought))
            await arrival.place.enter_async_context(self._registry.opening(opening.session))
        except BaseException as error:
            await arrival.leave(error)
            raise
        self._coming[offer.token] = arrival
        return arrival

    async def lose(self, arrival: Arrival) -> None:
        """Forget a session whose connection has been lost before anything came."""
        self._coming.pop(arrival.offer.token, None)
        await arrival.leave(GivenUp())

    def begin(self, arrival: Arrival, connection: socket.socket) -> None:
        """Have the engine receive the session over the connection, unless it has been given up already."""
        if arrival.offer.token not in self._coming:
            connection.close()
            return
        arrival.received = asyncio.create_task(arrival.receive(self._registry.executor, connection))
        arrival.received.add_done_callback(lambda task: self._ended(arrival, task))

    def _ended(self, arrival: Arrival, task: asyncio.Task[None]) -> None:
        """The session has come, or will not: wait for what the old home says."""
        if not task.cancelled():
            task.exception()  # the asking task gets it
        if not task.cancelled() and arrival.committing is None:
            arrival.timer = asyncio.get_running_loop().call_later(WAIT_S, self._give_up, arrival)

    async def commit(self, token: str, word: str) -> Answer:
        """Take the session, as the old home lets it go. The answer is certain: it has been taken, or never will be.

        Raises `NotDurable` if nothing can be said for certain.
        """
        arrival = self._coming.get(token)
        if arrival is None or arrival.word != word:
            return Answer.refusing(PeerFull("nothing is known of that move here: the server may have started again"))
        if arrival.committing is None:
            if arrival.timer is not None:
                arrival.timer.cancel()
            arrival.committing = asyncio.create_task(self._commit(arrival))
        return await asyncio.shield(arrival.committing)

    async def _commit(self, arrival: Arrival) -> Answer:
        try:
            try:
                await arrival.came()
            except BaseException as error:
                await arrival.leave(error)
                raise
            await self._open(arrival)
        except NotDurable:
            raise
        except DjinnError as error:
            return Answer.refusing(PeerFull(error.message) if isinstance(error, FULL) else error)
        except Exception as error:
            logger.exception("a session could not be opened")
            return Answer.refusing(PeerMismatch(f"it could not be opened: {error}"))
        finally:
            self._coming.pop(arrival.offer.token, None)
        logger.info("a session has come from %s", arrival.offer.source, extra={"session": arrival.session})
        return Answer(taken=Taken.YES)

    async def _open(self, arrival: Arrival) -> None:
        try:
            if arrival.losses != self._registry.executor.losses:
                raise EngineRestarting("the engine that had received the session has died")
            await arrival.opening.open(self._registry)
        except BaseException as error:
            await arrival.leave(error)
            self._abandon(arrival)
            raise
        arrival.opening.session.arrived_at = time.monotonic()
        await arrival.place.aclose()  # it is found from now on, and what is bound to it with it
        self._bindings.adopt(arrival.opening.brought)
        if arrival.losses != self._registry.executor.losses:
            await reopen_late(self._registry, arrival.opening.session)
        arrival.opening.go_on(self._registry)

    async def abort(self, token: str) -> Answer:
        """Give the session up; says why it could not be received, if that is why."""
        arrival = self._coming.get(token)
        if arrival is None or arrival.committing is not None:
            return Answer()
        del self._coming[token]
        error = await self._end(arrival)
        return Answer() if error is None else Answer.refusing(error)

    async def settle(self, question: Question) -> Answer:
        """Whether the session has been taken with that move. If not, it never will be. Raises `NotDurable`."""
        if question.journal not in ("", self.journal):
            return Answer(taken=Taken.FORGOTTEN)
        for arrival in [each for each in self._coming.values() if each.session == question.session]:
            if arrival.offer.epoch > question.epoch:
                continue
            if arrival.committing is not None:
                await asyncio.wait([arrival.committing])
            else:
                self._give_up(arrival)
        await self._registry.keeper.settled_id(question.session)
        return Answer(taken=self._homes.has_taken(question.session, question.epoch, question.seq))

    async def close(self) -> None:
        """Give up all that have not been taken."""
        for arrival in list(self._coming.values()):
            for task in (arrival.received, arrival.committing):
                if task is not None:
                    task.cancel()
            if arrival.committing is None:
                await arrival.leave(GivenUp())
        for end in list(self._ends):
            end.cancel()

    def _give_up(self, arrival: Arrival) -> None:
        """Begin to give up a session of which the old home says nothing more."""
        if self._coming.pop(arrival.offer.token, None) is not None:
            end = asyncio.create_task(self._end(arrival))
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)

    async def _end(self, arrival: Arrival) -> DjinnError | None:
        """Give up a session; returns why the engine has not got it, unless it has."""
        await arrival.leave(GivenUp())
        if arrival.received is None:
            return None
        try:
            await arrival.came()
        except DjinnError as error:
            return error
        self._abandon(arrival)
        return None

    def _abandon(self, arrival: Arrival) -> None:
        """Have the engine forget a session that it has."""
        session = arrival.opening.session
        if session.state is not SessionState.CLOSED:
            self._registry.abandon(session)
