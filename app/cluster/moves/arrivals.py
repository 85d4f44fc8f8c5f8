"""Sessions that arrive: they are offered, received by the engine, and taken when the old home says so."""

import asyncio
import logging
import secrets
import socket
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial

from app.cluster.moves.talk import FORMAT, OFFER, SETTLE, Answer, Offer, Question, Take, Way, give, model_of
from app.domain.errors import (
    DjinnError,
    EngineRestarting,
    JournalUnavailable,
    Moving,
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
from app.openai.response_store import ResponseStore, in_order
from app.sessions.keeper import session_of
from app.sessions.lifecycle import reopen_late
from app.sessions.named import BoundSessions
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.tenants.tenant import Directory

logger = logging.getLogger(__name__)
AT_ONCE, WAIT_S, EXPLAIN_S = 8, 10.0, 2.0
"""Most sessions on their way here; how long one waits for its silent old home; how long its failure is kept."""


class GivenUp(Exception):
    """The session does not arrive."""


class Arrival:
    """One such session, which requests cannot find yet."""

    task: asyncio.Task[Answer]
    """All that becomes of it, once there is a connection."""
    decided: asyncio.Future[bool]
    """Whether it is to be taken or given up, as the old home says."""

    def __init__(self, registry: SessionRegistry, offer: Offer) -> None:
        """Reads an offer, which may take long. Raises `ValueError` and `FieldOutOfRange` if it is malformed."""
        history = array("I", offer.history)
        self.offer = offer
        self.snapshot = read_snapshot(registry, offer.label.encode(), history)
        steering = Steering(self.snapshot.breakpoints, self.snapshot.interventions)
        self.session = session_of(offer.record, history, steering)
        self.session.uncounted, self.session.returns_at = offer.uncounted, offer.returns_at
        self.session.prompt_tokens = max(0, min(offer.prompt_tokens, len(history)))
        sessions = {*(each.session for each in offer.keyed), *(each.session for each in offer.responses)}
        if sessions - {self.session.id} or any(each.owner != self.session.owner for each in offer.keyed):
            raise ValueError("a key or a response is of another session")
        self.responses = in_order(offer.responses)
        self.word = secrets.token_hex(16)
        """Only the old home is told this, so nobody else can repeat its messages."""
        self._registry = registry
        self.failure: DjinnError | None = None
        """Why the engine has not received the session, and never will."""
        self.losses = 0
        """The executor's count of lost engines when the engine began to receive the session."""

    async def outcome(self, *, is_wanted: bool) -> Answer:
        """What becomes of it: if that is not decided yet, it is taken as far as `is_wanted`. Raises `NotDurable`."""
        if not self.decided.done():
            self.decided.set_result(is_wanted)
        return await asyncio.shield(self.task)

    async def receive(self, connection: socket.socket) -> None:
        """Return when the engine has received the session over the connection. Raises why it has not."""
        executor, record, turn = self._registry.executor, self.offer.record, self.snapshot.turn
        number = give(executor, connection)
        self.losses = executor.losses
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
        if self.losses != self._registry.executor.losses:
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
        keeper.note(session, home, [record for record, _ in self.responses], self.offer.keyed)
        try:
            await keeper.settled(session)
        except NotDurable as error:
            keeper.homes.undo(session.id, before)
            keeper.depart(session, before)
            await keeper.settled(session)
            raise JournalUnavailable(f"no session was opened: {error.reason}") from error


class Arrivals:
    """Used on the event loop only."""

    def __init__(
        self,
        registry: SessionRegistry,
        directory: Directory,
        bound: BoundSessions,
        responses: ResponseStore,
        tasks: Tasks,
    ) -> None:
        """`directory` is that of the tenants."""
        self.on_taken: Callable[[Session], object] = lambda session: None
        """Called with each session that has arrived."""
        self._registry, self._directory, self._tasks = registry, directory, tasks
        self._bound, self._responses = bound, responses
        self._homes, identity = registry.keeper.homes, registry.keeper.identity
        self._journal = "" if identity is None else identity.uuid
        self._coming: dict[SessionId, Arrival] = {}
        self.ways: Mapping[str, Way] = {OFFER: (Offer, self.offer), SETTLE: (Question, self.settle)}
        """What other servers may ask, by path."""

    async def offer(self, offer: Offer, take: Take) -> None:
        """Have the engine receive a session. The old home is told this server's count of moves, the word for this one,
        and the journal's UUID. Raises `DjinnError`, `ValueError` and `OSError`.
        """
        async with AsyncExitStack() as undo:
            arrival = await self._note(offer, undo)
            connection = take(f"{self._homes.seq} {arrival.word} {self._journal}")
            place = undo.pop_all()
        self._coming[offer.record.id] = arrival
        arrival.task = self._tasks.start(self._arrive(arrival, connection, place))
        arrival.task.add_done_callback(lambda _: self._coming.pop(offer.record.id))

    async def _note(self, offer: Offer, place: AsyncExitStack) -> Arrival:
        """Read and check an offer. Its session counts as open until `place` unwinds."""
        self._require_welcome(offer)
        responses = [each.id for each in offer.responses]
        await self._registry.keeper.settled_id(offer.record.id, responses)  # what is left of it from before
        arrival = await asyncio.to_thread(Arrival, self._registry, offer)
        other = self._coming.get(offer.record.id)
        if other is not None and other.failure is not None:
            await other.outcome(is_wanted=False)
        self._require_absent(offer)
        arrival.decided = asyncio.get_running_loop().create_future()
        place.enter_context(self._bound.expecting(arrival.session))
        place.enter_context(self._responses.expecting(offer.responses))
        await place.enter_async_context(self._registry.opening(arrival.session))
        return arrival

    def _require_welcome(self, offer: Offer) -> None:
        """Raise `PeerMismatch` if this server cannot serve it, and what `SessionTable.require_guarantee` raises."""
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
        if session in self._coming:
            raise WrongState(f"session {session} is on its way here already")
        if len(self._coming) >= AT_ONCE:
            raise PeerFull(f"{AT_ONCE} sessions are on their way here")
        if table.giving_way(offer.record.owner, 1):
            raise PeerFull("as many sessions are open as may be: others would have to close for good")

    async def _arrive(self, arrival: Arrival, connection: socket.socket, place: AsyncExitStack) -> Answer:
        """Whether the session, which has its `place`, was taken, and why not. Raises `NotDurable` if it may be."""
        session, decided = arrival.session, arrival.decided
        try:
            async with place:
                try:
                    await arrival.receive(connection)
                except DjinnError as error:
                    arrival.failure = error
                await asyncio.wait([decided], timeout=WAIT_S if arrival.failure is None else EXPLAIN_S)
                if arrival.failure is not None:
                    raise arrival.failure
                if not (decided.done() and decided.result()):
                    raise GivenUp
                await arrival.open()
                session.arrived_at = time.monotonic()
        except Exception as error:
            if arrival.failure is None and session.state is not SessionState.CLOSED:
                self._registry.abandon(session)
            if isinstance(error, GivenUp):
                return Answer()
            if isinstance(error, NotDurable):
                raise
            if not isinstance(error, DjinnError):
                logger.exception("a session could not be opened")
            return Answer.refusing(error)
        # From now on clients find the session here, and all that is bound to it.
        self._bound.adopt(session)
        self._responses.adopt(session, arrival.responses)
        self._registry.keeper.keyed.adopt(arrival.offer.keyed)
        if arrival.offer.waits is not None:
            self._registry.tool_waits.adopt(session, arrival.offer.waits)
        self.on_taken(session)
        executor = self._registry.executor
        if arrival.losses != executor.losses:
            await reopen_late(self._registry, session)
        if executor.failure is None:  # from now on others of its tenant may share its KV
            executor.post(partial(PublishKV, session=session.id))
        self._registry.pauses.go_on(session, arrival.offer.pause_expires_at)
        logger.info("a session has come from %s", arrival.offer.source, extra={"session": session.id})
        return Answer(taken=Taken.YES)

    async def settle(self, question: Question, _: Take) -> Answer:
        """Whether the session has been taken with that move; with its word it is taken now, as the old home lets it go.
        If not, it never will be, and the answer may say why. Raises `NotDurable` if that is not certain.
        """
        if question.journal not in ("", self._journal):
            return Answer(taken=Taken.FORGOTTEN)
        answer, arrival = Answer(), self._coming.get(question.session)
        if arrival is not None and arrival.offer.epoch <= question.epoch:
            with suppress(NotDurable):
                answer = await arrival.outcome(is_wanted=question.word == arrival.word)
        elif question.word:
            answer = Answer.refusing(PeerFull("that move is not known here: the server may have started again"))
        await self._registry.keeper.settled_id(question.session)
        taken = self._homes.has_taken(question.session, question.epoch, question.seq)
        return Answer(taken, answer.code, answer.message)
