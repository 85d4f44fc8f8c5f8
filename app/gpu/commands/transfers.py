"""How sessions are opened, and KV that goes to a file or to another server's engine, or comes from one: exports, moves
of sessions, and prompts that one server computes for another.

What takes a while is an `Exchange`, which the dispatcher goes on with until it can be answered. A session that goes
first has its KV brought to the host, as far as there is room. It stays until it is closed.

A prompt comes part by part, as it is computed. A part is what one step computes. It is not sent layer by layer: a block
is one run of bytes over all layers, and the layers of a step run without a stop between them. So all but the last part
are on their way while the next is computed.
"""

import hashlib
from collections.abc import Collection, Generator, Mapping
from typing import Any

from app import messages
from app.domain.errors import (
    BadExport,
    Busy,
    DiskShort,
    EngineError,
    FieldOutOfRange,
    PeerFull,
    PeerMismatch,
    WrongState,
)
from app.domain.values import Residency, SessionId, Ticket, Tier, common_prefix
from app.gpu.kv.placement import Placement
from app.gpu.kv.tiers import file_namespace
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.kv_header import KVFileHeader
from app.gpu.state.moves import Move, Moved, MoveKind
from app.gpu.state.sequence import TokenSequence, TurnState
from app.machine.handover import SocketTable

Exchange = Generator[Move | None, Moved | None, object]
"""A command that takes a while. It yields the move that it waits for, or None, and is resumed with that one's report,
or with None whenever something may have changed. It returns what `Done` answers, or raises."""

RETRY_AFTER_S = 1


class Transfers:
    """Knows the sessions that are open, and has sessions and prompts go and come. Turns are held until theirs come."""

    def __init__(
        self,
        placement: Placement,
        max_model_len: int,
        saved: Mapping[SessionId, KVFileHeader],
        refused: Collection[SessionId],
        connections: SocketTable,
    ) -> None:
        """`saved` are the headers of KV files that an earlier server has left; those that are `refused` are damaged or
        of another model. None is deleted before every session has been opened and could claim its own.
        """
        self._placement, self._tiers, self._cache = placement, placement.tiers, placement.tiers.cache
        self._host = self._cache.host
        self._max_model_len, self.connections = max_model_len, connections
        self._saved, self._refused = dict(saved), refused
        self.sessions: dict[SessionId, TokenSequence] = {}
        """Every open session's sequence."""
        self._own_blocks = self._cache.pool.num_blocks
        """Device blocks without those that weights lend, and take back."""
        self._receiving = set[Ticket]()
        """Turns for which a prompt comes, or will when there is room for it."""

    # Sessions.

    def open(self, command: messages.Open) -> None:
        """Make a session known, with the KV of its file. Raises `Busy` if no more residency can be guaranteed."""
        self._check_reserve(command.residency)
        sequence = make_sequence(command)
        sequence.breakpoints = {each.id: each for each in command.breakpoints}
        if not command.had_kv:
            sequence.reached = 0
        self._claim(sequence)
        self.add(sequence)

    def add(self, sequence: TokenSequence) -> None:
        """Make a session without a turn known."""
        self._placement.end_turn(sequence)
        self.sessions[sequence.session] = sequence

    def _claim(self, sequence: TokenSequence) -> None:
        """Give a session that has just been opened the KV in its file, up to the first token that differs."""
        saved = self._saved.pop(sequence.session, None)
        if saved is None:
            return
        computed = saved.computed_tokens
        same = common_prefix(tuple(sequence.tokens), tuple(saved.token_ids))
        if same < computed and self._cache.pool.state_blocks:
            same = 0  # the state in the file is of more tokens
        if same and saved.namespace == file_namespace(sequence, computed):  # imported KV has none, and is never shared
            self._placement.adopt(sequence, min(same, computed), saved.blocks, saved.behind)
        else:
            self._tiers.delete_file(sequence)

    def delete_files(self) -> None:
        """Delete the files that no session has claimed, as every session has been opened."""
        for session in (*self._saved, *self._refused):
            self._tiers.delete_file(TokenSequence(session, b"", closed=True))
        self._placement.counts.disk_failures += len(self._refused)
        self._saved, self._refused = {}, ()

    def _check_reserve(self, residency: Residency) -> None:
        """Of a guaranteed residency, raise `Busy` unless one more session can have a full context set aside, and one
        context be left for all others; `FieldOutOfRange` if the device is too small for any.
        """
        if residency is not Residency.GUARANTEED:
            return
        pool = self._cache.pool
        context = pool.most_for(self._max_model_len)
        reserved = sum(sequence.guaranteed for sequence in self.sessions.values())
        if 2 * context > self._own_blocks:
            raise FieldOutOfRange(
                "residency cannot be guaranteed: the device has KV for "
                f"{self._own_blocks // pool.stripe * pool.block_size} tokens, not two contexts of "
                f"{self._max_model_len}; the server needs a larger --kv-device",
                param="residency",
            )
        if (reserved + 2) * context > self._own_blocks:
            raise Busy(
                f"the device has room to guarantee {self._own_blocks // context - 1} sessions of "
                f"{self._max_model_len} tokens, and {reserved} are open",
                retry_after_s=RETRY_AFTER_S,
                param="residency",
            )

    def export(self, sequence: TokenSequence, command: messages.Export) -> Exchange:
        """Write the session's file. Raises `DiskShort`, `EngineError`."""
        where = {"path": command.path, "about": command.about}
        move, report = yield from self._copy_away(sequence, MoveKind.EXPORT, make_room=False, **where)
        if report.disk_is_full:
            raise DiskShort(f"the session's file was not stored: {report.error}")
        if report.error is not None:
            raise EngineError(f"the export failed: {report.error}")
        return messages.ExportedKV(len(move.token_ids), move.computed)

    def import_(self, command: messages.Import) -> Exchange:
        """Check a client's file, and open its session. Raises `BadExport`."""
        sequence = TokenSequence(command.session, namespace_hash(command.namespace), tenant=command.tenant)
        move = self._tiers.order(sequence, MoveKind.IMPORT, path=command.path, max_tokens=self._max_model_len)
        report = yield from _arrival(move)
        if report.error is not None:
            raise BadExport(f"the import failed: {report.error}")
        sequence.tokens, sequence.adapter = list(report.token_ids), report.adapter
        sequence.namespace = namespace_hash(command.namespace, report.adapter)
        sequence.assume_computed()
        sequence.sent = True
        self._adopt(sequence, report)
        return messages.ImportedKV(report.token_ids, report.about_at, report.about_bytes, report.adapter)

    def send(self, sequence: TokenSequence, command: messages.SendKV) -> Exchange:
        """Send the session. Raises `WrongState`, `EngineError`."""
        if sequence.captures.records or sequence.captures.dropped:
            raise WrongState(
                f"cannot move: session {command.session} has captures, which stay behind: read them, and clear them"
            )
        where = {"connection": command.connection}
        move, report = yield from self._copy_away(sequence, MoveKind.SEND, make_room=True, **where)
        if report.error is not None:
            raise EngineError(f"the session was not sent: {report.error}")
        return messages.SentKV(len(move.token_ids), move.computed, report.sent_bytes)

    def receive(self, command: messages.ReceiveKV) -> Exchange:
        """Receive the session, to the host or else to its file, and open it. Raises `WrongState` if it is here already,
        `Busy`, `PeerFull` if there is and will be no room, `PeerMismatch`, `EngineError`.
        """
        if command.session in self.sessions:
            raise WrongState(f"session {command.session} is here already")
        self._check_reserve(command.residency)
        sequence = make_sequence(command)
        on_host = blocks = self._host.kept_for(len(sequence.tokens))
        while on_host and not self._placement.make_host_room(blocks, sequence):
            if self._placement.host_is_emptying:
                yield None
            elif self._placement.make_disk_room(blocks, sequence, ()):
                on_host = 0
            else:
                raise PeerFull(f"neither host memory nor the disk has room for {blocks} blocks of KV")
        move = self._tiers.order(
            sequence,
            MoveKind.RECEIVE,
            target=tuple(self._host.allocate(on_host)),
            token_ids=tuple(sequence.tokens),
            namespace=file_namespace(sequence, len(sequence.tokens)),
            connection=command.connection,
        )
        report = yield from _arrival(move)
        if report.is_mismatch:
            raise PeerMismatch(f"the session is not for this server: {report.error}")
        if report.disk_is_full:
            raise PeerFull(f"the disk has no room for the session's KV: {report.error}")
        if report.error is not None:
            raise EngineError(f"the session has not come: {report.error}")
        if report.computed and not move.target:
            self._adopt(sequence, report)
        else:
            self.add(sequence)
        return sequence.computed

    def _adopt(self, sequence: TokenSequence, report: Moved) -> None:
        """Open a session whose file has the KV of its first tokens, as the report says."""
        blocks = self._host.groups.count_held(self._host.blocks_for(report.computed), report.behind)
        self._placement.adopt(sequence, report.computed, blocks, report.behind)
        self.add(sequence)

    def _copy_away(
        self, sequence: TokenSequence, kind: MoveKind, *, make_room: bool, **where: Any
    ) -> Generator[Move | None, Moved | None, tuple[Move, Moved]]:
        """Bring the KV to the host. Then move the history, and the KV of whole passes that the host has."""
        while not self._is_on_host(sequence, make_room=make_room):
            yield None
        host, behind = self._host, sequence.behind
        computed = min(sequence.computed, len(sequence.host_blocks) // host.stripe * host.block_size)
        copies = sequence.host_blocks
        if host.state_blocks and len(copies) < host.blocks_for(sequence.written):
            computed = 0  # nor is KV of use without the state, which comes last
        if host.first_seen(computed) < behind:  # without its last blocks, what the host has is useless
            computed = behind = 0
        if host.state_blocks and computed:
            copies = self._cache.of_whole_passes(sequence, copies)
        blocks = tuple(host.groups.held(copies[: host.blocks_for(computed)], behind))
        host.share(blocks)
        of_history = {"source": blocks, "behind": behind, "token_ids": tuple(sequence.tokens), "computed": computed}
        move = self._tiers.order(sequence, kind, **of_history, **where)
        return move, (yield from _arrival(move))

    def _is_on_host(self, sequence: TokenSequence, *, make_room: bool) -> bool:
        """Whether there is nothing to wait for. With `make_room` other sessions are evicted where that is needed."""
        if sequence.busy:
            return True
        pool = self._cache.pool  # a state comes behind the blocks of a paused pass
        whole = pool.blocks_for(sequence.written if pool.state_blocks else sequence.computed)
        if sequence.tier is Tier.DISK:
            needed = sequence.disk_blocks
        elif sequence.tier is Tier.DEVICE and len(sequence.host_blocks) < whole:
            needed = sequence.uncopied_before(whole)
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

    # Prompts that another server computes.

    def hold(self, sequence: TokenSequence, command: messages.Submit) -> list[messages.Event]:
        """Hold the turn that has just begun, if another server may compute its prompt and enough of it lacks KV: as
        much as the command says, and half of it. That server computes what was there before too.
        """
        turn, tokens = sequence.turn, len(sequence.tokens)
        may_ask = command.apart_tokens and command.sampling.prompt_logprobs is None
        if turn is None or not may_ask or not self._may_wait(sequence):
            return []
        most_known = tokens - 1 - max(command.apart_tokens, tokens // 2)
        if sequence.computed > most_known:  # of most turns nearly all is known, and they need no further look
            return []
        known = max(len(self._cache.find_prefix(sequence, pool)[1]) for pool in (self._cache.pool, self._host))
        if known * self._host.block_size > most_known:
            return []
        if sequence.tier is None:
            self._cache.match_host_prefix(sequence)
        turn.awaits_prefill = True
        first = min(len(sequence.host_blocks), len(sequence.hashes) * self._host.stripe)
        if not self._host.groups.full:
            first = max(first, self._host.first_kept(tokens - 1))
        return [messages.Lacking(sequence.session, turn.ticket, first)]

    def _may_wait(self, sequence: TokenSequence) -> bool:
        """Whether KV that comes to the host is as good for the session as its own."""
        # A state is of use at its end only, and a prompt comes in parts.
        host = self._host
        on_host = host.num_blocks >= host.kept_for(len(sequence.tokens)) and not host.state_blocks
        at_rest = sequence.moving is None and sequence.tier in (None, Tier.DEVICE, Tier.HOST)
        return on_host and at_rest and not (sequence.watched or sequence.guaranteed or sequence.adapter)

    def compute_prompt(self, command: messages.ComputePrompt) -> None:
        """Let the turn go on alone, unless it has ended, or something comes for it."""
        sequence = self.sessions.get(command.session)
        if sequence is not None and (turn := self._held(sequence, command)) is not None:
            turn.awaits_prefill = False

    def _held(
        self, sequence: TokenSequence, command: messages.ReceivePrompt | messages.ComputePrompt
    ) -> TurnState | None:
        """The turn that the command is for, if it is held and nothing comes for it yet."""
        turn = sequence.turn
        if turn is None or turn.ticket != command.turn or not turn.awaits_prefill or turn.ticket in self._receiving:
            return None
        return turn

    def receive_prompt(self, sequence: TokenSequence, command: messages.ReceivePrompt) -> Exchange:
        """Receive the prompt while its turn waits; then the turn goes on. Raises `WrongState`, `PeerFull`."""
        turn = self._held(sequence, command)
        if turn is None:
            raise WrongState(f"session {command.session} waits for no prompt")
        host, computed = self._host, len(sequence.tokens) - 1
        first, behind = command.first, host.first_kept(computed)
        needed = host.groups.count_held(host.blocks_for(computed), behind) - host.groups.count_held(first, behind)
        hashes = host.parts_of(self._cache.prompt_hashes(sequence))[first:]
        is_wanted = True
        self._receiving.add(turn.ticket)
        try:
            while not self._placement.make_host_room(needed, sequence):
                if not self._placement.host_is_emptying:
                    raise PeerFull(f"host memory has no room for {needed} blocks of KV")
                yield None
                if sequence.turn is not turn:
                    raise WrongState(f"session {command.session} waits for no prompt any more")
            turn.coming = self._tiers.order(
                sequence,
                MoveKind.RECEIVE_PROMPT,
                target=tuple(host.allocate(needed)),
                first=first,
                behind=behind,
                hashes=tuple(host.groups.held(hashes, behind - first)),
                token_ids=tuple(sequence.tokens[:computed]),
                connection=command.connection,
            )
            while (report := (yield turn.coming)) is None:
                if is_wanted and sequence.turn is not turn:
                    is_wanted = False
                    self.connections.discard(command.connection)
        finally:
            self._receiving.discard(turn.ticket)
            turn.awaits_prefill, turn.coming = False, None
        came = max(0, report.computed - first // host.stripe * host.block_size)
        return messages.ReceivedPrompt(came, report.error)

    # A prompt that is computed for another server.

    def send_prompt(self, sequence: TokenSequence, command: messages.SendPrompt) -> Exchange:
        """Send the session's blocks from `first` on, as they are computed. Raises `WrongState`, `EngineError`."""
        sent, end, sent_bytes = command.first, self._host.blocks_for(len(sequence.tokens)), 0
        if end <= sent:
            raise WrongState(f"session {command.session} has no block to send")
        while sent < end:
            ready = self._ready_blocks(sequence, command, sent, end)
            if ready == sent:
                yield None
                continue
            behind = self._host.first_kept(len(sequence.tokens))  # what the receiver does not need, as it knows
            source = tuple(self._host.groups.held(sequence.host_blocks[sent:ready], behind - sent))
            self._host.share(source)
            move = self._tiers.order(
                sequence,
                MoveKind.SEND_PROMPT,
                source=source,
                token_ids=tuple(sequence.tokens),
                connection=command.connection,
                begins=sent == command.first,
                ends=ready == end,
            )
            report = yield from _arrival(move)  # a receiver that has all of it closes before the report is here
            if report.error is not None:
                raise _not_sent(report.error)
            sent, sent_bytes = ready, sent_bytes + report.sent_bytes
        return messages.SentKV(len(sequence.tokens), len(sequence.tokens), sent_bytes)

    def _ready_blocks(self, sequence: TokenSequence, command: messages.SendPrompt, sent: int, end: int) -> int:
        """Bring computed blocks to the host. Returns the end of those that can be sent, or raises `EngineError`."""
        if self.connections.is_ended(command.connection):
            raise _not_sent("the other server wants it no more")
        if sequence.session not in self.sessions:
            raise _not_sent("its session has been closed")
        # The last block is filled in part, and whole only when the turn is over.
        is_computed = not sequence.busy and sequence.computed == len(sequence.tokens)
        computed = end if is_computed else self._host.place_of(sequence.computed)
        on_device = sequence.tier is Tier.DEVICE and sequence.outgoing is None
        if sent < sequence.first_held:
            raise _not_sent("its first blocks lie behind the model's window by now")
        lacks = max(sent, sequence.copied) < computed
        if on_device and lacks and not self._tiers.copy_out(sequence, computed):
            if self._placement.make_host_room(sequence.uncopied_before(computed), sequence):
                self._tiers.copy_out(sequence, computed)
            elif not self._placement.host_is_emptying:
                raise _not_sent("host memory has no room for its KV")
        ready = max(sent, min(computed, len(sequence.host_blocks)))
        if ready == sent and not sequence.busy and (computed < end or sequence.tier in (Tier.DISK, None)):
            raise _not_sent("the prompt was not computed to its end")
        return ready


def _arrival(move: Move) -> Generator[Move | None, Moved | None, Moved]:
    """Wait for the move's end."""
    while (report := (yield move)) is None:
        pass
    return report


def _not_sent(reason: str) -> EngineError:
    return EngineError(f"the prompt was not sent: {reason}")


def make_sequence(command: messages.Open | messages.ReceiveKV) -> TokenSequence:
    """The session that a command tells of. All of its history has had its KV elsewhere."""
    sequence = TokenSequence(
        command.session,
        namespace_hash(command.tenant if command.namespace is None else command.namespace, command.adapter),
        command.residency is Residency.GUARANTEED,
        list(command.token_ids),
        tenant=command.tenant,
        adapter=command.adapter,
        interventions=InterventionLog(command.interventions),
    )
    sequence.assume_computed()
    return sequence


def namespace_hash(name: str, adapter: str = "") -> bytes:
    """First parent of the chain of block hashes: KV of one adapter never serves another one, or none."""
    return hashlib.blake2b(name.encode(), digest_size=16, salt=bytes.fromhex(adapter)[:16]).digest()
