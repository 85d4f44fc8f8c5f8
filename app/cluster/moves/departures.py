"""Sessions that leave for other servers. They are offered, sent, and let go once the new home has them."""

import asyncio
import logging
import time
from itertools import chain, repeat

from msgspec.structs import replace

from app.cluster.fleet import Replica
from app.cluster.hop import Hops
from app.cluster.membership import Membership
from app.cluster.moves.talk import MAX_RESPONSE_BYTES, OFFER, Answer, Offer, Question, ask, connect, give, model_of
from app.domain.errors import (
    AlreadyThere,
    DjinnError,
    EngineError,
    FieldOutOfRange,
    JournalUnavailable,
    Moved,
    MoveUnsettled,
    Moving,
    NotDurable,
    PeerMismatch,
    TooLarge,
    UnknownReplica,
    WrongState,
)
from app.domain.homes import HomeState, MoveReason, Taken
from app.domain.tasks import Tasks
from app.domain.values import SessionId, SessionState
from app.exports.snapshot import has_room, take_snapshot
from app.messages import SendKV, SentKV
from app.openai.response_store import ResponseStore
from app.openai.response_store import record_of as response_record
from app.sessions.keeper import record_of
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session

logger = logging.getLogger(__name__)
AT_ONCE = 4
"""Sessions that are sent at the same time; others wait for their turn."""
ALONE_S, LOOK_S = 1.0, 0.005
"""How long requests for a session may still take that were there before its move, and between two looks."""
ASK_S = (0.2, 1.0, 2.0, 5.0)
"""Between two questions after a session that may have been taken. The last repeats itself."""
TELL = 12
"""One in so many unanswered questions is a warning in the log: about one a minute for each session."""
Departure = tuple[Replica, SentKV, float]


class Departures:
    """Used on the event loop only."""

    def __init__(
        self, registry: SessionRegistry, hops: Hops, responses: ResponseStore, membership: Membership, tasks: Tasks
    ) -> None:
        self._registry, self._responses, self._membership, self._tasks = registry, responses, membership, tasks
        self._keeper, self._homes = registry.keeper, registry.keeper.homes
        self._hops, self._fleet = hops, hops.fleet
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def require_home(self, session: SessionId, owner: str | None, or_any: bool) -> None:
        """Raise `Moved` if the session has gone to another server, and the caller may know it; `Moving` if it has just
        come, and is not open yet.
        """
        home = self._homes.of(session)
        if home is None or not (or_any or home.owner == owner):
            return
        if home.state is HomeState.HERE and self._registry.table.find(session) is not None:
            raise Moving(f"session {session} has just come here: try again")
        if home.state is HomeState.GONE:
            peer = self._fleet.find(home.peer)
            where = home.peer if peer is None else f"{home.peer} {peer.seen.url}"
            raise Moved(f"session {session} is on server {where}: ask there", home=where)

    async def move(self, session: Session, name: str, reason: MoveReason = MoveReason.OPERATOR) -> Departure:
        """Move the session to the server of that name. Returns that, what was sent, and how many seconds it took.

        It goes on if the caller is cancelled. Raises `UnknownReplica`, `AlreadyThere`, `WrongState`, `TooLarge`,
        `PeerAway`, `PeerFull`, `PeerMismatch`, `PeerStranger`, `NameTaken`, `JournalUnavailable`, `EngineError`: then
        the session is here as before. Raises `MoveUnsettled` if it may be here or there: then the other server is asked
        until it says which.
        """
        if name == self._fleet.here:
            raise AlreadyThere(f"this is {name}, where session {session.id} is already")
        peer = self._peer(name)
        if reason is not MoveReason.DRAIN:
            self._registry.table.require_no_drain()
        session.require(SessionState.IDLE, SessionState.PAUSED, to="move")
        if session.ephemeral:
            raise WrongState(f"cannot move: session {session.id} lives for one call only")
        session.leaving = True
        self._registry.pauses.hold(session)
        return await asyncio.shield(self._tasks.start(self._move(session, peer, reason)))

    async def settle(self, session_id: SessionId, dead: str) -> Session:
        """Keep a session that was leaving: the server that it went to, whose journal has the UUID `dead`, will never
        say whether it has it. From now on no server may use that journal, so other sessions that left for it stay too.

        Raises `NotFound`, `Moved`; `WrongState` if the session is not leaving; `FieldOutOfRange` if it left for another
        journal; `DirectoryAway`: then it is as it was.
        """
        table = self._registry.table
        session = table.find(session_id) or table.get(session_id, or_any=True)
        home = self._homes.of(session_id)
        if home is None or home.state is not HomeState.LEAVING or not session.leaving:
            raise WrongState(f"session {session_id} is not locked in a move: it is served here")
        if home.peer_journal not in ("", dead):
            raise FieldOutOfRange(
                f"peer_is_dead: session {session_id} left for {home.peer} with the journal {home.peer_journal}, not "
                f"for {dead[:40]!r}",
                param="peer_is_dead",
            )
        await self._membership.bury(dead, home.peer)
        if self._homes.of(session_id) == home:
            logger.warning("an operator says that %s is dead: a session stays", home.peer, extra=_about(session))
            self._stay(session)
            await self._keeper.settled(session)
        return session

    def settle_all(self) -> None:
        """Ask about the sessions that were leaving when the server ended."""
        for session in self._registry.table:
            if session.leaving:
                self._tasks.start(self._settle(session))

    async def _move(self, session: Session, peer: Replica, why: MoveReason) -> Departure:
        async with self._at_once:
            began, own = time.perf_counter(), int(why is MoveReason.OPERATOR)
            try:
                # No other request may use the session while it moves. An answered request ends in a moment.
                for _ in range(round(ALONE_S / LOOK_S)):
                    if (others := session.requests - own) <= 0:
                        break
                    await asyncio.sleep(LOOK_S)
                else:
                    raise WrongState(f"cannot move: {others} other requests for session {session.id} are under way")
                sent, question = await self._send(session, peer)
            except BaseException:
                self._stay(session)
                raise
            await self._commit(session, peer, question)
        seconds = time.perf_counter() - began
        self._registry.metrics.moved.labels(why.value).inc()
        logger.info("a session has gone to %s in %.3f s", peer.name, seconds, extra=_about(session))
        return peer, sent, seconds

    async def _send(self, session: Session, peer: Replica) -> tuple[SentKV, Question]:
        """Send the session, and write to the journal that it leaves. Returns the question at which it is taken, too."""
        executor, offer = self._registry.executor, await self._offer(session)
        connection, said = await connect(self._hops, peer, OFFER, offer)
        try:
            seq, word, journal = said.split(" ")
            question = Question(session.id, offer.epoch, int(seq), journal)
        except ValueError as error:
            connection.close()
            raise PeerMismatch(f"{peer.name} speaks another version: it answers {said[:40]!r}") from error
        try:
            number = give(executor, connection)
            sending = asyncio.ensure_future(executor.call(lambda ticket: SendKV(ticket, session.id, number)))
            try:
                # Beside the bytes, not after them: it takes a flush of the disk.
                leaving = self._homes.leave(session.id, session.owner, peer.name, int(seq), session.bound_as, journal)
                self._keeper.note(session, leaving)
                await self._keeper.settled(session)
                await self._membership.note(moves=self._homes.seq)
                sent: SentKV = await sending
            finally:
                sending.cancel()
            if session.state is SessionState.CLOSED:
                raise WrongState(f"session {session.id} has been closed meanwhile")
        except DjinnError as error:
            raise await self._reason(peer, question, error) from error
        return sent, replace(question, word=word)

    async def _reason(self, peer: Replica, question: Question, error: DjinnError) -> DjinnError:
        """Why the session could not be sent. The other server, which gives it up as it is asked, may know it better."""
        try:
            better = (await ask(self._hops, peer, question)).error
        except DjinnError as away:
            better = away
        if isinstance(error, NotDurable):
            return JournalUnavailable(f"the session has not moved: {error.reason}")
        return better or error if isinstance(error, EngineError) else error

    async def _offer(self, session: Session) -> Offer:
        history, pause = session.history, session.pause
        snapshot, turn, place = await take_snapshot(self._registry, session)
        about = await asyncio.to_thread(snapshot.to_json)
        if not await asyncio.to_thread(has_room, about.encode(), len(history)):
            raise TooLarge("the session's metadata, breakpoints, edits and paused turn are too large to move")
        responses = self._responses.of_session(session)
        if sum(each.size for each in responses) > MAX_RESPONSE_BYTES:
            raise TooLarge(f"the session's responses have more than the {MAX_RESPONSE_BYTES} bytes that can move")
        return Offer(
            source=self._fleet.here,
            epoch=self._homes.epoch(session.id) + 1,
            model=model_of(self._registry.executor.engine.info),
            record=record_of(session),
            history=history.tobytes(),
            before=None if place is None else place.before.tobytes(),
            uncounted=session.uncounted,
            returns_at=session.returns_at,
            pause_expires_at=None if pause is None else pause.expires_at,
            label=about,
            responses=await asyncio.to_thread(lambda: [response_record(each) for each in responses]),
            waits=self._registry.tool_waits.export(session),
            prompt_tokens=session.prompt_tokens,
            keyed=self._keeper.keyed.of_session(session.id),
            cached_tokens=0 if turn is None else turn.cached_tokens,
            tokens_recomputed=0 if turn is None else turn.tokens_recomputed,
        )

    async def _commit(self, session: Session, peer: Replica, question: Question) -> None:
        """Let the other server take the session. From here on only its word counts."""
        try:
            answer = await ask(self._hops, peer, question)
        except Exception as error:
            logger.warning("%s has not said whether it has a session: it is asked", peer.name, extra=_about(session))
            self._tasks.start(self._settle(session))
            raise MoveUnsettled(
                f"session {session.id} may be on {peer.name} or here, and neither answers until {peer.name} says "
                f"which: {error}"
            ) from error
        self._follow(session, answer)
        if answer.taken is not Taken.YES:
            raise answer.error or PeerMismatch(f"{peer.name} has not taken the session")

    def _follow(self, session: Session, answer: Answer) -> None:
        """Let the session go, or keep it."""
        if answer.taken is not Taken.YES:
            self._stay(session)
        elif session.state is not SessionState.CLOSED:
            gone = self._responses.let_go(session)
            self._registry.depart(session, self._homes.go(session.id, gone), gone)

    def _stay(self, session: Session) -> None:
        home = self._homes.of(session.id)
        session.leaving = False
        if session.state is SessionState.CLOSED:
            return
        if home is not None and home.state is HomeState.LEAVING:
            self._keeper.note(session, self._homes.stay(session.id))
        self._registry.pauses.go_on(session)

    async def _settle(self, session: Session) -> None:
        """Ask until it is known who has the session."""
        for asked, wait in enumerate(chain(ASK_S, repeat(ASK_S[-1]))):
            level = logging.DEBUG if asked % TELL else logging.WARNING
            await asyncio.sleep(wait)
            home = self._homes.of(session.id)
            if home is None or home.state is not HomeState.LEAVING or session.state is SessionState.CLOSED:
                return
            if home.peer_journal in self._membership.buried:
                logger.warning("%s is dead: a session that was leaving stays", home.peer, extra=_about(session))
                self._stay(session)
                return
            question = Question(session.id, home.epoch, home.peer_seq, home.peer_journal)
            try:
                answer = await ask(self._hops, self._peer(home.peer), question)
                if answer.taken is Taken.FORGOTTEN:
                    raise PeerMismatch("it has forgotten")
            except Exception as error:
                text = "%s, whose journal is %s, did not say whether it has a session: %s"
                logger.log(level, text, home.peer, home.peer_journal, error, extra=_about(session))
                continue
            logger.info("%s says of a session that leaves: %s", home.peer, answer.taken, extra=_about(session))
            self._follow(session, answer)

    def _peer(self, name: str) -> Replica:
        """The replica of that name. Raises `UnknownReplica`."""
        if (peer := self._fleet.find(name)) is None:
            raise UnknownReplica(f"replica: no server of the cluster is called {name[:40]!r}", param="replica")
        return peer


def _about(session: Session) -> dict[str, object]:
    return {"session": session.id}
