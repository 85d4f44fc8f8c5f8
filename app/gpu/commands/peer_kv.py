"""Sessions on their way to another server's engine, and from one."""

import logging
from collections.abc import Callable

from app.domain.errors import DjinnError, EngineError, PeerFull, PeerMismatch, WrongState
from app.domain.values import Residency
from app.gpu.commands.host_bound import HostBound
from app.gpu.commands.sessions import SessionHandler, namespace_hash
from app.gpu.kv.placement import Placement
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.moves import Move, Moved, MoveKind
from app.gpu.state.sequence import TokenSequence
from app.messages import Done, Event, Failed, ReceivedKV, ReceiveKV, SendKV, SentKV

logger = logging.getLogger(__name__)


class PeerKV:
    """Sends sessions and receives them. One that is sent stays, until it is closed."""

    def __init__(
        self,
        placement: Placement,
        host_bound: HostBound,
        sessions: SessionHandler,
        discard: Callable[[int], None],
    ) -> None:
        """`discard` closes the connection of that number."""
        self._placement = placement
        self._tiers = placement.tiers
        self._host_bound = host_bound
        self._sessions = sessions
        self._discard = discard
        self._sending: dict[int, SendKV] = {}
        self._waiting: list[tuple[ReceiveKV, TokenSequence]] = []
        """Those that the host makes room for."""
        self._receiving: dict[int, tuple[ReceiveKV, TokenSequence]] = {}

    def send(self, command: SendKV) -> list[Event]:
        """Begin to send the session; `finish` answers. Raises `NotFound`, `WrongState`."""
        try:
            sequence = self._sessions.find_resting(command.session)
            if sequence.captures.records or sequence.captures.dropped:
                raise WrongState(
                    f"cannot move: session {command.session} has captures, which stay behind: read them, and clear them"
                )
        except DjinnError:
            self._discard(command.connection)
            raise

        def begin() -> None:
            self._sending[self._tiers.send(sequence, command.connection).number] = command

        self._host_bound.then(sequence, begin, make_room=True)
        return []

    def receive(self, command: ReceiveKV) -> list[Event]:
        """Begin to receive the session; `finish` answers. Raises `WrongState` if it is here already, `Busy`."""
        guaranteed = command.residency is Residency.GUARANTEED
        try:
            self._sessions.require_place(command.session, guaranteed=guaranteed)
        except DjinnError:
            self._discard(command.connection)
            raise
        sequence = TokenSequence(
            command.session,
            namespace_hash(command.tenant if command.namespace is None else command.namespace),
            guaranteed,
            list(command.token_ids),
            tenant=command.tenant,
            interventions=InterventionLog(command.interventions),
        )
        sequence.assume_computed()
        self._waiting.append((command, sequence))
        return self.go_on()

    def go_on(self) -> list[Event]:
        """Begin to receive those that there is room for now. One that there will be none for is refused."""
        events: list[Event] = []
        for entry in tuple(self._waiting):
            command, sequence = entry
            try:
                has_begun = self._find_room(command, sequence)
            except Exception as error:  # those behind it wait for other room
                if not isinstance(error, DjinnError):
                    logger.exception("a session could not be received")
                    error = EngineError(f"the session could not be received: {error}")
                self._discard(command.connection)
                events.append(Failed(command.ticket, error))
            else:
                if not has_begun:
                    continue
            self._waiting.remove(entry)
        return events

    def finish(self, move: Move, report: Moved) -> list[Event]:
        """Answer the command whose move has ended."""
        if move.kind is MoveKind.SEND:
            sent = self._sending.pop(move.number)
            if report.error is not None:
                return [Failed(sent.ticket, EngineError(f"the session was not sent: {report.error}"))]
            return [Done(sent.ticket, SentKV(len(move.token_ids), move.computed, report.sent_bytes))]
        command, sequence = self._receiving.pop(move.number)
        if report.error is not None:
            return [Failed(command.ticket, _failure(report))]
        if report.computed and not move.target:
            blocks = self._tiers.cache.host.blocks_for(report.computed)
            self._placement.adopt(sequence, report.computed, blocks)
        self._sessions.add(sequence)
        return [Done(command.ticket, ReceivedKV(sequence.computed))]

    def _find_room(self, command: ReceiveKV, sequence: TokenSequence) -> bool:
        """Begin to receive the session. False: there is no room yet. Raises `PeerFull` if there will be none."""
        blocks = self._tiers.cache.host.blocks_for(len(sequence.tokens))
        if self._placement.make_host_room(blocks, sequence):
            self._begin(command, sequence, blocks)
        elif self._placement.host_is_emptying:
            return False
        elif self._placement.make_disk_room(blocks, sequence, ()):
            self._begin(command, sequence, 0)
        else:
            raise PeerFull(f"neither host memory nor the disk has room for {blocks} blocks of KV")
        return True

    def _begin(self, command: ReceiveKV, sequence: TokenSequence, blocks: int) -> None:
        move = self._tiers.receive(sequence, command.connection, blocks)
        self._receiving[move.number] = command, sequence


def _failure(report: Moved) -> DjinnError:
    if report.is_mismatch:
        return PeerMismatch(f"the session is not for this server: {report.error}")
    if report.disk_is_full:
        return PeerFull(f"the disk has no room for the session's KV: {report.error}")
    return EngineError(f"the session has not come: {report.error}")
