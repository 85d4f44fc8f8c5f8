"""Sessions that arrive from other servers. They are offered, received by the engine, and taken when the old home says
so.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from array import array
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from app.cluster.key import new_nonce
from app.cluster.moves.bindings import Bindings, Brought
from app.cluster.moves.calls import give
from app.cluster.moves.wire import FORMAT, Answer, Model, Offer, Question
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
    WrongState,
)
from app.domain.homes import Taken
from app.domain.values import Phase, Residency, SessionState
from app.exports.checks import read_snapshot
from app.journal.records import Steering
from app.messages import PublishKV, ReceiveKV, SetPhase
from app.sessions.keeper import session_of
from app.sessions.lifecycle import reopen_late
from app.sessions.registry import SessionRegistry
from app.tenants.tenant import Directory

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""How many sessions may be on their way here."""
WAIT_S = 60.0
"""How long a session that has come is kept for an old home that says nothing."""
FULL = (Busy, Draining, DiskShort, JournalUnavailable, EngineAway, NotDurable)
"""Refusals that have nothing to do with the session itself."""


class GivenUp(Exception):
    """The session does not arrive."""


class Arrival:
    """One such session, which requests cannot find yet."""

    def __init__(self, registry: SessionRegistry, offer: Offer) -> None:
        """Reads an offer, which may take long. Raises `ValueError` and `FieldOutOfRange` if it is malformed."""
        history = array("I", offer.history)
        self.offer = offer
        self.snapshot = read_snapshot(registry, offer.label.encode(), history)
        self.session = session_of(
            offer.record, history, Steering(self.snapshot.breakpoints, self.snapshot.interventions)
        )
        self.session.uncounted, self.session.returns_at = offer.uncounted, offer.returns_at
        self.brought = Brought(self.session, offer.binding)
        self.word = new_nonce()
        """Only the old home is told this, so nobody else can repeat its messages."""
        self.received: asyncio.Task[None] | None = None
        """Ends when the engine has received the session, or has failed to."""
        self.committing: asyncio.Task[Answer] | None = None
        """Set once the old home has said that the session may be taken."""
        self.timer: asyncio.TimerHandle | None = None
        self.place = AsyncExitStack()
        """Its place among the sessions that may be open, while it is on its way."""
        self._registry = registry
        self._losses = 0
        """The executor's count of lost engines when the engine began to receive the session."""

    @property
    def has_failed(self) -> bool:
        """Whether it was not received, and never will be."""
        task = self.received
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    @property
    def has_lost_engine(self) -> bool:
        """Whether the engine that received it has died."""
        return self._losses != self._registry.executor.losses

    async def leave(self, error: BaseException) -> None:
        """Give up its place."""
        if self.timer is not None:
            self.timer.cancel()
        await self.place.__aexit__(type(error), error, None)

    async def receive(self, connection: socket.socket) -> None:
        """Return when the engine has received the session over the connection. Raises why it has not."""
        executor, record, turn = self._registry.executor, self.offer.record, self.snapshot.turn
        number = give(executor, connection)
        self._losses = executor.losses
        await executor.call(
            lambda ticket: ReceiveKV(
                ticket,
                record.id,
                number,
                record.owner or "",
                record.residency,
                tuple(array("I", self.offer.history)),
                self.snapshot.interventions if turn is None else turn.interventions,
                record.namespace,
                record.adapter_digest or "",
            )
        )

    async def came(self) -> None:
        """Return when the engine has the session. Raises why it has not."""
        assert self.received is not None
        await asyncio.shield(self.received)

    async def open(self) -> None:
        """Give the session, which the engine has, all that it had elsewhere.

        It is durable when this returns. If this raises, the engine forgets the session, and the journal does not have
        it, unless the error is `NotDurable`: then it may.
        """
        try:
            if self.has_lost_engine:
                raise EngineRestarting("the engine that had received the session has died")
            await self._furnish()
            await self._keep()
        except BaseException as error:
            await self.leave(error)
            self.abandon()
            raise

    def go_on(self) -> None:
        """Have the session go on where it stood. From now on others of its tenant may share its KV."""
        if self._registry.executor.failure is None:
            self._registry.executor.post(partial(PublishKV, session=self.session.id))
        if self.offer.pause_expires_at is not None:
            self._registry.pauses.go_on(self.session, self.offer.pause_expires_at)

    def abandon(self) -> None:
        """Have the engine forget the session."""
        if self.session.state is not SessionState.CLOSED:
            self._registry.abandon(self.session)

    async def end(self) -> DjinnError | None:
        """Give the session up. Returns why the engine has not received it, if it has not."""
        await self.leave(GivenUp())
        if self.received is None:
            return None
        try:
            await self.came()
        except DjinnError as error:
            return error
        self.abandon()
        return None

    async def _furnish(self) -> None:
        """Give the engine's session what it has beside its KV."""
        session, found, offer, turns = self.session, self.snapshot.turn, self.offer, self._registry.turns
        if found is None:
            await turns.furnish(session, None, None)
        else:
            place = found.to_place(session.history, before=array("I", offer.before or b""))
            cached, again = offer.cached_tokens, offer.tokens_recomputed
            turn = replace(found.to_turn(), cached_tokens=cached, tokens_recomputed=again)
            await turns.furnish(session, turn, place, sent=place.left_of_prompt)
        if session.phase is not Phase.COMPUTE:
            self._registry.executor.post(partial(SetPhase, session=session.id, phase=session.phase))

    async def _keep(self) -> None:
        """Write to the journal that it is here. Raises `JournalUnavailable` if that is not in the journal."""
        session, keeper = self.session, self._registry.keeper
        before = keeper.homes.of(session.id)
        home = keeper.homes.arrive(session.id, session.owner, self.offer.source, self.offer.epoch, session.bound_as)
        keeper.note(session, home, self.brought.records, self.brought.keyed)
        try:
            await keeper.settled(session)
        except NotDurable as error:
            keeper.homes.undo(session.id, before)
            keeper.depart(session, before)
            await keeper.settled(session)
            raise JournalUnavailable(f"no session was opened: {error.reason}") from error


def require_welcome(offer: Offer, registry: SessionRegistry, directory: Directory) -> None:
    """Raise `PeerMismatch` if the other server runs another model, or one with an adapter that is not here, moves
    sessions in another way, or if the session's owner is unknown here. Raises what `SessionTable.require_guarantee`
    raises.
    """
    if offer.format != FORMAT:
        raise PeerMismatch(f"the session is in format {offer.format} of moves, this server reads {FORMAT}")
    here, record = Model.of(registry.executor.engine.info), offer.record
    if offer.model != here:
        raise PeerMismatch(f"the session is of the model {offer.model}, this server runs {here}")
    adapter, digest, owner = record.adapter, record.adapter_digest, record.owner
    if digest is not None and registry.adapters.by_digest(digest) is None:
        raise PeerMismatch(f"the session's LoRA adapter, {adapter!r} ({digest[:12]}), is not loaded there")
    if owner is None if directory else owner is not None:
        raise PeerMismatch("one of the two servers has tenants, and the other has none")
    if owner is not None and directory.named(owner) is None:
        raise PeerMismatch(f"there is no tenant {owner} here")
    if record.residency is Residency.GUARANTEED:
        registry.table.require_guarantee(owner)


def require_absent(offer: Offer, registry: SessionRegistry, coming: Iterable[Arrival]) -> None:
    """Raise `Moving` or `WrongState` if the session is here, has been or is coming, `PeerFull` if too many come.
    `coming` are those on their way.
    """
    session, homes, coming = offer.record.id, registry.keeper.homes, list(coming)
    found = registry.table.find(session)
    if found is not None and found.leaving:
        raise Moving(f"session {session} has left here, but it is not known yet where it is: try again")
    if found is not None:
        raise WrongState(f"session {session} is here already")
    if homes.epoch(session) >= offer.epoch:
        raise WrongState(f"session {session} has been moved since: {homes.epoch(session)} times")
    if any(each.session.id == session or each.offer.token == offer.token for each in coming):
        raise WrongState(f"session {session} is on its way here already")
    if len(coming) >= AT_ONCE:
        raise PeerFull(f"{AT_ONCE} sessions are on their way here")
    if registry.table.giving_way(offer.record.owner, 1):
        raise PeerFull("as many sessions are open as may be: others would have to close for good")


class Arrivals:
    """Used on the event loop only."""

    def __init__(self, registry: SessionRegistry, directory: Directory, bindings: Bindings) -> None:
        self._registry = registry
        self._bindings = bindings
        self._homes = registry.keeper.homes
        self._directory = directory
        self._coming: dict[str, Arrival] = {}
        """By the tokens of their offers."""
        self._ends = set[asyncio.Task[Any]]()

    @property
    def journal(self) -> str:
        """The UUID of the journal that will say whether a session has been taken."""
        identity = self._registry.keeper.identity
        return "" if identity is None else identity.uuid

    def said(self, arrival: Arrival) -> str:
        """What the old home is told: the server's count of moves, the word for this one, and the journal's UUID."""
        return f"{self._homes.seq} {arrival.word} {self.journal}"

    async def offer(self, offer: Offer) -> Arrival:
        """Take note of a session that is offered. Raises `PeerFull`, `PeerMismatch`, `NameTaken`, `Moving`."""
        try:
            return await self._note(offer)
        except FULL as error:
            raise PeerFull(error.message) from error
        except (PeerFull, PeerMismatch, NameTaken, Moving):
            raise
        except Exception as error:  # the other server may be of any version
            raise PeerMismatch(f"the session cannot be opened here: {error}") from error

    async def _note(self, offer: Offer) -> Arrival:
        require_welcome(offer, self._registry, self._directory)
        responses = [response for response, _ in offer.binding.responses]
        await self._registry.keeper.settled_id(offer.record.id, responses)  # what is left of it from before
        arrival = await asyncio.to_thread(Arrival, self._registry, offer)
        for other in self._coming_of(arrival):
            if other.has_failed:
                await self._coming.pop(other.offer.token).end()
        require_absent(offer, self._registry, self._coming.values())
        try:
            arrival.place.enter_context(self._bindings.expecting(arrival.brought))
            await arrival.place.enter_async_context(self._registry.opening(arrival.session))
        except BaseException as error:
            await arrival.leave(error)
            raise
        self._coming[offer.token] = arrival
        return arrival

    def _coming_of(self, of: Arrival | Question) -> list[Arrival]:
        session = of.session.id if isinstance(of, Arrival) else of.session
        return [each for each in self._coming.values() if each.session.id == session]

    async def lose(self, arrival: Arrival) -> None:
        """Forget a session whose connection was lost before anything arrived."""
        self._coming.pop(arrival.offer.token, None)
        await arrival.leave(GivenUp())

    def begin(self, arrival: Arrival, connection: socket.socket) -> None:
        """Have the engine receive the session over the connection, unless it has been given up already."""
        if arrival.offer.token not in self._coming:
            connection.close()
            return
        arrival.received = asyncio.create_task(arrival.receive(connection))
        arrival.received.add_done_callback(lambda task: self._ended(arrival, task))

    def _ended(self, arrival: Arrival, task: asyncio.Task[None]) -> None:
        """The session was received, or was not: wait for the old home's word."""
        if not task.cancelled():
            task.exception()  # the asking task gets it
            if arrival.committing is None:
                arrival.timer = asyncio.get_running_loop().call_later(WAIT_S, self._give_up, arrival)

    async def commit(self, token: str, word: str) -> Answer:
        """Take the session, as the old home lets it go.

        The answer is final: it was taken, or never will be. Raises `NotDurable` if that is not certain.
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
            await arrival.open()
            arrival.session.arrived_at = time.monotonic()
            await arrival.place.aclose()  # it is found from now on, and what is bound to it with it
            self._bindings.adopt(arrival.brought)
            if arrival.has_lost_engine:
                await reopen_late(self._registry, arrival.session)
            arrival.go_on()
        except NotDurable:
            raise
        except DjinnError as error:
            return Answer.refusing(PeerFull(error.message) if isinstance(error, FULL) else error)
        except Exception as error:
            logger.exception("a session could not be opened")
            return Answer.refusing(PeerMismatch(f"it could not be opened: {error}"))
        finally:
            self._coming.pop(arrival.offer.token, None)
        logger.info("a session has come from %s", arrival.offer.source, extra={"session": arrival.session.id})
        return Answer(taken=Taken.YES)

    async def abort(self, token: str) -> Answer:
        """Give the session up; says why it could not be received, if that is why."""
        arrival = self._coming.get(token)
        if arrival is None or arrival.committing is not None:
            return Answer()
        error = await self._coming.pop(token).end()
        return Answer() if error is None else Answer.refusing(error)

    async def settle(self, question: Question) -> Answer:
        """Whether the session has been taken with that move. If not, it never will be. Raises `NotDurable`."""
        if question.journal not in ("", self.journal):
            return Answer(taken=Taken.FORGOTTEN)
        for arrival in self._coming_of(question):
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
            end = asyncio.create_task(arrival.end())
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)
