"""Sessions that come from other servers: offered, received by the engine, taken when the old home says so."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from array import array
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from app.cluster.moves.bindings import Bindings
from app.cluster.moves.giving import give
from app.cluster.moves.key import new_nonce
from app.cluster.moves.opening import Opening
from app.cluster.moves.wire import FORMAT, Answer, Model, Offer, Question
from app.domain.errors import (
    Busy,
    DiskShort,
    DjinnError,
    Draining,
    EngineRestarting,
    JournalUnavailable,
    Moving,
    NameTaken,
    NotDurable,
    PeerFull,
    PeerMismatch,
    WrongState,
)
from app.domain.homes import Taken
from app.domain.values import Residency, SessionId, SessionState
from app.messages import ReceiveKV
from app.sessions.lifecycle import reopen_late
from app.sessions.registry import SessionRegistry
from app.tenants.directory import Directory

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""Sessions that may be on their way here."""
WAIT_S = 60.0
"""How long a session that has come is kept for an old home that says nothing."""
FULL = (Busy, Draining, DiskShort, JournalUnavailable, EngineRestarting, NotDurable)
"""What has nothing to do with the session itself."""


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


class _GivenUp(Exception):
    """The session does not come."""


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

    async def offer(self, offer: Offer) -> Arrival:
        """Take note of a session that is offered. Raises `PeerFull`, `PeerMismatch`, `NameTaken`."""
        if offer.format != FORMAT:
            raise PeerMismatch(f"the session is in format {offer.format} of moves, this server reads {FORMAT}")
        here = Model.of(self._registry.executor.engine.info)
        if offer.model != here:
            raise PeerMismatch(f"the session is of the model {offer.model}, this server runs {here}")
        try:
            return await self._note(offer)
        except FULL as error:
            raise PeerFull(error.message) from error
        except (PeerFull, PeerMismatch, NameTaken, Moving):
            raise
        except Exception as error:  # the other server may be of any version
            raise PeerMismatch(f"the session cannot be opened here: {error}") from error

    async def _note(self, offer: Offer) -> Arrival:
        session, owner = offer.record.id, offer.record.owner
        if owner is None if self._directory else owner is not None:
            raise PeerMismatch("one of the two servers has tenants, and the other has none")
        if owner is not None and self._directory.named(owner) is None:
            raise PeerMismatch(f"there is no tenant {owner} here")
        if offer.record.residency is Residency.GUARANTEED:
            self._registry.table.require_guarantee(owner)
        responses = [response for response, _ in offer.binding.responses]
        await self._registry.keeper.settled_id(session, responses)  # what is left of it from before
        opening = await asyncio.to_thread(Opening.of, self._registry, offer)
        for other in [each for each in self._coming.values() if each.session == session and each.has_failed]:
            await self._end(self._coming.pop(other.offer.token))
        self._require_absent(session, offer)
        if self._registry.table.giving_way(owner, 1):
            raise PeerFull("as many sessions are open as may be: others would have to close for good")
        arrival = Arrival(offer, opening)
        try:
            arrival.place.enter_context(self._bindings.expecting(opening.brought))
            await arrival.place.enter_async_context(self._registry.opening(opening.session))
        except BaseException as error:
            await arrival.leave(error)
            raise
        self._coming[offer.token] = arrival
        return arrival

    def _require_absent(self, session: SessionId, offer: Offer) -> None:
        found = self._registry.table.find(session)
        if found is not None and found.leaving:
            raise Moving(f"session {session} has left here, but it is not known yet where it is: try again")
        if found is not None:
            raise WrongState(f"session {session} is here already")
        if self._homes.epoch(session) >= offer.epoch:
            raise WrongState(f"session {session} has been moved since: {self._homes.epoch(session)} times")
        if any(each.session == session for each in self._coming.values()) or offer.token in self._coming:
            raise WrongState(f"session {session} is on its way here already")
        if len(self._coming) >= AT_ONCE:
            raise PeerFull(f"{AT_ONCE} sessions are on their way here")

    async def lose(self, arrival: Arrival) -> None:
        """Forget a session whose connection has been lost before anything came."""
        self._coming.pop(arrival.offer.token, None)
        await arrival.leave(_GivenUp())

    def begin(self, arrival: Arrival, connection: socket.socket) -> None:
        """Have the engine receive the session over the connection, unless it has been given up already."""
        if arrival.offer.token not in self._coming:
            connection.close()
            return
        arrival.received = asyncio.create_task(self._receive(arrival, connection))
        arrival.received.add_done_callback(lambda task: self._ended(arrival, task))

    async def _receive(self, arrival: Arrival, connection: socket.socket) -> None:
        executor, offer, opening = self._registry.executor, arrival.offer, arrival.opening
        number = give(executor, connection)
        arrival.losses = executor.losses
        await executor.call(
            lambda ticket: ReceiveKV(
                ticket,
                arrival.session,
                number,
                offer.record.owner or "",
                offer.record.residency,
                tuple(array("I", offer.history)),
                opening.computed_with,
                offer.record.namespace,
            )
        )

    def _ended(self, arrival: Arrival, task: asyncio.Task[None]) -> None:
        """The session has come, or will not: wait for what the old home says."""
        if not task.cancelled():
            task.exception()  # whoever asks is told
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
                await self._received(arrival)
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
                await arrival.leave(_GivenUp())
        for end in list(self._ends):
            end.cancel()

    async def _received(self, arrival: Arrival) -> None:
        """Return when the engine has the session. Raises why it has not."""
        assert arrival.received is not None
        await asyncio.shield(arrival.received)

    def _give_up(self, arrival: Arrival) -> None:
        """Begin to give up a session of which the old home says nothing more."""
        if self._coming.pop(arrival.offer.token, None) is not None:
            end = asyncio.create_task(self._end(arrival))
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)

    async def _end(self, arrival: Arrival) -> DjinnError | None:
        """Give up a session; returns why the engine has not got it, unless it has."""
        await arrival.leave(_GivenUp())
        if arrival.received is None:
            return None
        try:
            await self._received(arrival)
        except DjinnError as error:
            return error
        self._abandon(arrival)
        return None

    def _abandon(self, arrival: Arrival) -> None:
        """Have the engine forget a session that it has."""
        session = arrival.opening.session
        if session.state is not SessionState.CLOSED:
            self._registry.abandon(session)
