"""KV that goes to a file or to another server's engine, or comes from one: exports, moves of sessions, restarts.

A session that goes first has its KV brought to the host, as far as there is room. It stays until it is closed.
"""

import logging
from collections.abc import Collection, Iterable, Mapping

from app.domain.errors import BadExport, DiskShort, DjinnError, EngineError, PeerFull, PeerMismatch, WrongState
from app.domain.histories import common_prefix
from app.domain.values import SessionId, Ticket, Tier
from app.gpu.commands.sessions import Sessions, make_sequence, namespace_hash, require_rest
from app.gpu.kv.phases import Phases
from app.gpu.kv.placement import Placement
from app.gpu.kv.shutdown import ShutdownFlush
from app.gpu.kv.stream import PromptStreams
from app.gpu.kv.tiers import file_namespace
from app.gpu.state.kv_header import KVFileHeader
from app.gpu.state.moves import Move, Moved
from app.gpu.state.sequence import TokenSequence
from app.messages import (
    Done,
    Event,
    Export,
    ExportedKV,
    Failed,
    Import,
    ImportedKV,
    KeepKV,
    KeptKV,
    ReceivedKV,
    ReceiveKV,
    SendKV,
    SentKV,
)

logger = logging.getLogger(__name__)


class Transfers:
    """Sessions that go or come at a client's word. Each begins with a command, which `finish` answers when its move has
    ended.
    """

    def __init__(self, placement: Placement, sessions: Sessions, max_model_len: int, transports: PromptStreams) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._sessions = sessions
        self._max_model_len = max_model_len
        self._transports = transports
        self._leaving: list[tuple[Export | SendKV, TokenSequence]] = []
        """Those whose KV is brought to the host."""
        self._coming: list[tuple[ReceiveKV, TokenSequence]] = []
        """Those that the host makes room for."""
        self._moving: dict[int, tuple[Export | Import | SendKV | ReceiveKV, TokenSequence]] = {}
        """By the number of the move."""

    def export(self, sequence: TokenSequence, command: Export) -> list[Event]:
        """Begin to write the session's file. Raises `WrongState`."""
        require_rest(sequence)
        self._leaving.append((command, sequence))
        self._bring_to_host()
        return []

    def import_(self, command: Import) -> list[Event]:
        """Begin to check a client's file."""
        sequence = TokenSequence(command.session, namespace_hash(command.namespace), tenant=command.tenant)
        move = self._tiers.import_file(sequence, command.path, max_tokens=self._max_model_len)
        self._moving[move.number] = command, sequence
        return []

    def send(self, sequence: TokenSequence, command: SendKV) -> list[Event]:
        """Begin to send the session. Raises `WrongState`."""
        require_rest(sequence)
        if sequence.captures.records or sequence.captures.dropped:
            raise WrongState(
                f"cannot move: session {command.session} has captures, which stay behind: read them, and clear them"
            )
        self._leaving.append((command, sequence))
        self._bring_to_host()
        return []

    def receive(self, command: ReceiveKV) -> list[Event]:
        """Begin to receive the session. Raises `WrongState` if it is here already, `Busy`."""
        self._sessions.require_place(command)
        self._coming.append((command, make_sequence(command)))
        return self._find_room()

    def go_on(self) -> list[Event]:
        """Look again at those that wait: a move has ended."""
        self._bring_to_host()
        return self._find_room()

    def finish(self, move: Move, report: Moved) -> list[Event]:
        """Answer the command whose move has ended."""
        command, sequence = self._moving.pop(move.number)
        if report.error is not None:
            return [Failed(command.ticket, _failure(command, report))]
        match command:
            case Export():
                return [Done(command.ticket, ExportedKV(len(move.token_ids), move.computed))]
            case SendKV():
                return [Done(command.ticket, SentKV(len(move.token_ids), move.computed, report.sent_bytes))]
            case Import():
                sequence.tokens = list(report.token_ids)
                sequence.assume_computed()
                sequence.sent = True
                self._adopt(sequence, report.computed)
                found = ImportedKV(report.token_ids, report.about_at, report.about_bytes)
                return [Done(command.ticket, found)]
            case ReceiveKV():
                if report.computed and not move.target:
                    self._adopt(sequence, report.computed)
                else:
                    self._sessions.add(sequence)
                return [Done(command.ticket, ReceivedKV(sequence.computed))]

    def _adopt(self, sequence: TokenSequence, computed: int) -> None:
        """Open a session whose file has the KV of its first `computed` tokens."""
        self._placement.adopt(sequence, computed, self._tiers.cache.host.blocks_for(computed))
        self._sessions.add(sequence)

    def _bring_to_host(self) -> None:
        """Order the moves of those whose KV the host has, or as much of it as it can get."""
        for entry in tuple(self._leaving):
            command, sequence = entry
            if not self._is_on_host(sequence, make_room=isinstance(command, SendKV)):
                continue
            self._leaving.remove(entry)
            if isinstance(command, SendKV):
                move = self._tiers.send(sequence, command.connection)
            else:
                move = self._tiers.export(sequence, command.path, command.about)
            self._moving[move.number] = entry

    def _is_on_host(self, sequence: TokenSequence, *, make_room: bool) -> bool:
        """Whether there is nothing to wait for; if there is, it is on its way. With `make_room` other sessions give
        way to this one.
        """
        if sequence.busy:
            return True
        whole = self._tiers.cache.pool.blocks_for(sequence.computed)
        if sequence.tier is Tier.DISK:
            needed = sequence.disk_blocks
        elif sequence.tier is Tier.DEVICE and len(sequence.host_blocks) < whole:
            needed = whole - len(sequence.host_blocks)
        else:
            return sequence.moving in (None, Tier.TO_DISK)
        if self._load(sequence, whole) or (make_room and self._placement.make_host_room(needed, sequence)):
            return not self._load(sequence, whole) or (sequence.tier is Tier.DEVICE and sequence.outgoing is None)
        return not (make_room and self._placement.host_is_emptying)

    def _load(self, sequence: TokenSequence, whole: int) -> bool:
        """Begin to bring the KV to the host, or go on with that. False: the host has no room."""
        if sequence.tier is Tier.DEVICE:
            return self._tiers.copy_out(sequence, whole)
        return sequence.tier is not Tier.DISK or self._tiers.load(sequence)

    def _find_room(self) -> list[Event]:
        """Begin to receive those that there is room for now. One that there will be none for is refused."""
        events: list[Event] = []
        for entry in tuple(self._coming):
            command, sequence = entry
            try:
                has_begun = self._begin(command, sequence)
            except Exception as error:  # those behind it wait for other room
                if not isinstance(error, DjinnError):
                    logger.exception("a session could not be received")
                    error = EngineError(f"the session could not be received: {error}")
                self._transports.end(command.connection)
                events.append(Failed(command.ticket, error))
                has_begun = True
            if has_begun:
                self._coming.remove(entry)
        return events

    def _begin(self, command: ReceiveKV, sequence: TokenSequence) -> bool:
        """Begin to receive the session. False: there is no room yet. Raises `PeerFull` if there will be none."""
        on_host = blocks = self._tiers.cache.host.blocks_for(len(sequence.tokens))
        if not self._placement.make_host_room(blocks, sequence):
            if self._placement.host_is_emptying:
                return False
            if not self._placement.make_disk_room(blocks, sequence, ()):
                raise PeerFull(f"neither host memory nor the disk has room for {blocks} blocks of KV")
            on_host = 0
        move = self._tiers.receive(sequence, command.connection, on_host)
        self._moving[move.number] = command, sequence
        return True


def _failure(command: Export | Import | SendKV | ReceiveKV, report: Moved) -> DjinnError:
    match command:
        case Export():
            if report.disk_is_full:
                return DiskShort(f"the session's file was not stored: {report.error}")
            return EngineError(f"the export failed: {report.error}")
        case Import():
            return BadExport(f"the import failed: {report.error}")
        case SendKV():
            return EngineError(f"the session was not sent: {report.error}")
        case ReceiveKV():
            if report.is_mismatch:
                return PeerMismatch(f"the session is not for this server: {report.error}")
            if report.disk_is_full:
                return PeerFull(f"the disk has no room for the session's KV: {report.error}")
            return EngineError(f"the session has not come: {report.error}")


class RestartKV:
    """KV that outlives the process: files that an earlier server has left, and what this one writes before it stops.

    No file is deleted before every session has been opened and could claim its own.
    """

    def __init__(
        self,
        placement: Placement,
        phases: Phases,
        saved: Mapping[SessionId, KVFileHeader],
        refused: Collection[SessionId],
    ) -> None:
        """`saved` are the headers of the files; those that are `refused` are damaged or of another model."""
        self._placement = placement
        self._phases = phases
        self._saved = dict(saved)
        self._refused = refused
        self._keeping: ShutdownFlush | None = None
        self._ticket = Ticket(0)

    def claim(self, sequence: TokenSequence) -> None:
        """Give a session that has just been opened the KV in its file, up to the first token that differs."""
        saved = self._saved.pop(sequence.session, None)
        if saved is None:
            return
        computed = saved.computed_tokens
        same = common_prefix(tuple(sequence.tokens), tuple(saved.token_ids))
        if same and saved.namespace == file_namespace(sequence, computed):  # imported KV has none, and is never shared
            blocks = self._placement.tiers.cache.host.blocks_for(computed)
            self._placement.adopt(sequence, min(same, computed), blocks)
        else:
            self._placement.tiers.delete_file(sequence)

    def delete_rest(self) -> None:
        """Delete the files that no session has claimed, as every session has been opened."""
        for session in (*self._saved, *self._refused):
            self._placement.tiers.delete_file(TokenSequence(session, b""))
        self._placement.count_disk_failures(len(self._refused))
        self._saved, self._refused = {}, ()

    @property
    def is_due(self) -> bool:
        """Whether `tick` can go on although no move has ended."""
        return self._keeping is not None and self._keeping.is_due

    def keep(self, command: KeepKV, sequences: Iterable[TokenSequence]) -> list[Event]:
        """Begin to write the KV of sessions, the first ones first; `tick` answers. No signal moves KV any more."""
        self._phases.rest()
        self._keeping = ShutdownFlush(self._placement, tuple(sequences), self._placement.clock() + command.within_s)
        self._ticket = command.ticket
        return []

    def tick(self) -> list[Event]:
        """Go on, and answer the command when nothing more will be written."""
        if self._keeping is None:
            return []
        self._keeping.tick()
        if not self._keeping.is_over:
            return []
        kept, lost, self._keeping = self._keeping.kept, self._keeping.lost, None
        return [Done(self._ticket, KeptKV(len(kept), _tokens(kept), len(lost), _tokens(lost)))]


def _tokens(sequences: Iterable[TokenSequence]) -> int:
    return sum(sequence.computed for sequence in sequences)
