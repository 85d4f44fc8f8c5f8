"""Sessions that arrive from other servers. They are offered, received by the engine, and taken when the old home says
so.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from array import array
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from app.cluster.moves.bindings import Bindings, Brought
from app.cluster.moves.talk import (
    ABORT,
    COMMIT,
    FORMAT,
    OFFER,
    SETTLE,
    Answer,
    Offer,
    Offered,
    Question,
    Step,
    Way,
    give,
    model_of,
)
from app.domain.errors import (
    DjinnError,
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
from app.domain.tasks import Tasks
from app.domain.values import Phase, Residency, SessionId, SessionState
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


def _refusal(error: Exception) -> DjinnError:
    """What the old home is told: that the session cannot come now, or that it cannot come at all."""
    if isinstance(error, PeerMismatch | NameTaken | Moving):
        return error
    if isinstance(error, DjinnError) and (error.status in (429, 503) or isinstance(error, NotDurable)):
        return PeerFull(error.message)
    return PeerMismatch(f"the session cannot be opened here: {error}")  # the other server may be of any version


class GivenUp(Exception):
    """The session does not arrive."""


class Arrival:
    """One such session, which requests cannot find yet."""

    task: asyncio.Task[Answer]
    """All that becomes of it, once there is a connection."""
    received: asyncio.Task[None]
    """Ends when the engine has received the session, or has failed to."""
    decided: asyncio.Future[bool]
    """Whether it is to be taken or given up. Set when the old home says so, or says nothing."""

    def __init__(self, registry: SessionRegistry, offer: Offer) -> None:
        """Reads an offer, which may take long. Raises `ValueError` and `FieldOutOfRange` if it is malformed."""
        history = array("I", offer.history)
        self.offer = offer
        self.snapshot = read_snapshot(registry, offer.label.encode(), history)
        steering = Steering(self.snapshot.breakpoints, self.snapshot.interventions)
        self.session = session_of(offer.record, history, steering)
        self.session.uncounted, self.session.returns_at = offer.uncounted, offer.returns_at
        self.brought = Brought(self.session, offer.binding)
        self.word = secrets.token_hex(16)
        """Only the old home is told this, so nobody else can repeat its messages."""
        self.place = AsyncExitStack()
        """Its place among the sessions that may be open, while it is on its way."""
        self._registry = registry
        self._losses = 0
        """The executor's count of lost engines when the engine began to receive the session."""

    @property
    def has_failed(self) -> bool:
        """Whether it was not received, and never will be."""
        return self.received.done() and (self.received.cancelled() or self.received.exception() is not None)

    @property
    def has_lost_engine(self) -> bool:
        """Whether the engine that received it has died."""
        return self._losses != self._registry.executor.losses

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

    async def open(self) -> None:
        """Give the session, which the engine has, all that it had elsewhere. It is durable when this returns. If this
        raises, the journal does not have it, unless the error is `NotDurable`: then it may.
        """
        if self.has_lost_engine:
            raise EngineRestarting("the engine that had received the session has died")
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
        await self._keep()

    async def _keep(self) -> None:
        """Write to the journal that it is here. Raises `JournalUnavailable` if that is not in the journal."""
        session, keeper = self.session, self._registry.keeper
        before = keeper.homes.of(session.id)
        home = keeper.homes.arrive(session.id, session.owner, self.offer.source, self.offer.epoch, session.bound_as)
        keeper.note(session, home, self.brought.records, self.brought.binding.keyed)
        try:
            await keeper.settled(session)
        except NotDurable as error:
            keeper.homes.undo(session.id, before)
            keeper.depart(session, before)
            await keeper.settled(session)
            raise JournalUnavailable(f"no session was opened: {error.reason}") from error

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


class Arrivals:
    """Used on the event loop only."""

    def __init__(self, registry: SessionRegistry, directory: Directory, bindings: Bindings, tasks: Tasks) -> None:
        """`directory` is that of the tenants."""
        self._registry = registry
        self._bindings = bindings
        self._homes = registry.keeper.homes
        self._directory = directory
        self._coming: dict[str, Arrival] = {}
        """Those that may still be taken, by the tokens of their offers."""
        self._tasks = tasks
        self.ways: Mapping[str, Way] = {
            OFFER: (Offer, self.offer),
            COMMIT: (Step, self.commit),
            ABORT: (Step, self.abort),
            SETTLE: (Question, self.settle),
        }
        """What other servers may ask, by path."""

    def _journal(self) -> str:
        identity = self._registry.keeper.identity
        return "" if identity is None else identity.uuid

    async def offer(self, offer: Offer) -> Offered:
        """Take note of a session. The old home is told this server's count of moves, the word for this one, and the
        journal's UUID. Raises `PeerFull`, `PeerMismatch`, `NameTaken`, `Moving`.
        """
        try:
            arrival = await self._note(offer)
        except Exception as error:
            raise _refusal(error) from error
        said = f"{self._homes.seq} {arrival.word} {self._journal()}"
        return Offered(said, partial(self._begin, arrival), partial(self._lose, arrival))

    async def _note(self, offer: Offer) -> Arrival:
        self._require_welcome(offer)
        responses = [response for response, _ in offer.binding.responses]
        await self._registry.keeper.settled_id(offer.record.id, responses)  # what is left of it from before
        arrival = await asyncio.to_thread(Arrival, self._registry, offer)
        for other in self._coming_of(offer.record.id):
            if other.has_failed:
                self._give_up(other)
                await asyncio.wait([other.task])
        self._require_absent(offer)
        arrival.decided = asyncio.get_running_loop().create_future()
        try:
            arrival.place.enter_context(self._bindings.expecting(arrival.brought))
            await arrival.place.enter_async_context(self._registry.opening(arrival.session))
        except BaseException as error:
            await arrival.place.__aexit__(type(error), error, None)
            raise
        self._coming[offer.token] = arrival
        return arrival

    def _require_welcome(self, offer: Offer) -> None:
        """Raise `PeerMismatch` if the other server runs another model, or one with an adapter that is not here, moves
        sessions in another way, or if the session's owner is unknown here. Raises what
        `SessionTable.require_guarantee` raises.
        """
        here, record = model_of(self._registry.executor.engine.info), offer.record
        adapter, digest, owner = record.adapter, record.adapter_digest, record.owner
        if offer.format != FORMAT:
            raise PeerMismatch(f"the session is in format {offer.format} of moves, this server reads {FORMAT}")
        if offer.model != here:
            raise PeerMismatch(f"the session is of the model {offer.model}, this server runs {here}")
        if digest is not None and self._registry.adapters.by_digest(digest) is None:
            raise PeerMismatch(f"the session's LoRA adapter, {adapter!r} ({digest[:12]}), is not loaded there")
        if owner is None if self._directory else owner is not None:
            raise PeerMismatch("one of the two servers has tenants, and the other has none")
        if owner is not None and self._directory.named(owner) is None:
            raise PeerMismatch(f"there is no tenant {owner} here")
        if record.residency is Residency.GUARANTEED:
            self._registry.table.require_guarantee(owner)

    def _require_absent(self, offer: Offer) -> None:
        """Raise `Moving` or `WrongState` if the session is here, has been or is coming, `PeerFull` if too many come."""
        session, table = offer.record.id, self._registry.table
        found, epoch = table.find(session), self._homes.epoch(session)
        if found is not None and found.leaving:
            raise Moving(f"session {session} has left here, but it is not known yet where it is: try again")
        if found is not None:
            raise WrongState(f"session {session} is here already")
        if epoch >= offer.epoch:
            raise WrongState(f"session {session} has been moved since: {epoch} times")
        if self._coming_of(session) or offer.token in self._coming:
            raise WrongState(f"session {session} is on its way here already")
        if len(self._coming) >= AT_ONCE:
            raise PeerFull(f"{AT_ONCE} sessions are on their way here")
        if table.giving_way(offer.record.owner, 1):
            raise PeerFull("as many sessions are open as may be: others would have to close for good")

    def _coming_of(self, session: SessionId) -> list[Arrival]:
        return [each for each in self._coming.values() if each.session.id == session]

    async def _lose(self, arrival: Arrival) -> None:
        """Forget a session whose connection was lost before anything arrived."""
        self._coming.pop(arrival.offer.token)
        with suppress(GivenUp):
            async with arrival.place:
                raise GivenUp

    def _begin(self, arrival: Arrival, connection: socket.socket) -> None:
        """Have the engine receive the session over the connection."""
        arrival.received = self._tasks.start(arrival.receive(connection))
        arrival.task = self._tasks.start(self._arrive(arrival))
        arrival.task.add_done_callback(lambda _: self._coming.pop(arrival.offer.token, None))

    async def _arrive(self, arrival: Arrival) -> Answer:
        """All that becomes of the session: returns whether it was taken, and why not. Raises `NotDurable` if that is
        not certain.
        """
        session, received, decided = arrival.session, arrival.received, arrival.decided
        either: tuple[asyncio.Future[Any], ...] = (received, decided)
        try:
            async with arrival.place:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait([decided], timeout=WAIT_S)
                if not (decided.done() and decided.result()):
                    raise GivenUp
                await received
                await arrival.open()
        except GivenUp:
            self._coming.pop(arrival.offer.token, None)
            try:
                await received
            except DjinnError as error:
                return Answer.refusing(error)
            arrival.abandon()
            return Answer()
        except BaseException as error:
            if received.done() and not arrival.has_failed:
                arrival.abandon()
            if isinstance(error, NotDurable) or not isinstance(error, Exception):
                raise
            if not isinstance(error, DjinnError):
                logger.exception("a session could not be opened")
            return Answer.refusing(_refusal(error))
        session.arrived_at = time.monotonic()
        self._bindings.adopt(arrival.brought)  # from now on clients find the session and its bindings here
        if arrival.has_lost_engine:
            await reopen_late(self._registry, session)
        arrival.go_on()
        logger.info("a session has come from %s", arrival.offer.source, extra={"session": session.id})
        return Answer(taken=Taken.YES)

    async def commit(self, step: Step) -> Answer:
        """Take the session, as the old home lets it go.

        The answer is final: it was taken, or never will be. Raises `NotDurable` if that is not certain.
        """
        arrival = self._coming.get(step.token)
        if arrival is None or arrival.word != step.word:
            return Answer.refusing(PeerFull("nothing is known of that move here: the server may have started again"))
        if not arrival.decided.done():
            arrival.decided.set_result(True)
        return await asyncio.shield(arrival.task)

    async def abort(self, step: Step) -> Answer:
        """Give the session up; says why it could not be received, if that is why."""
        arrival = self._coming.get(step.token)
        if arrival is None or arrival.decided.done():
            return Answer()
        self._give_up(arrival)
        return await asyncio.shield(arrival.task)

    async def settle(self, question: Question) -> Answer:
        """Whether the session has been taken with that move. If not, it never will be. Raises `NotDurable`."""
        if question.journal not in ("", self._journal()):
            return Answer(taken=Taken.FORGOTTEN)
        for arrival in self._coming_of(question.session):
            if arrival.offer.epoch > question.epoch:
                continue
            if arrival.decided.done():
                await asyncio.wait([arrival.task])
            else:
                self._give_up(arrival)
        await self._registry.keeper.settled_id(question.session)
        return Answer(taken=self._homes.has_taken(question.session, question.epoch, question.seq))

    def _give_up(self, arrival: Arrival) -> None:
        """It will not be taken."""
        self._coming.pop(arrival.offer.token, None)
        if not arrival.decided.done():
            arrival.decided.set_result(False)
