"""Remote prefill: one server computes a long prompt, and another goes on with the turn.

The KV comes part by part, as it is computed. A part is what one step computes. It is not sent layer by layer: a block
is one run of bytes over all layers, and the layers of a step run without a stop between them. So all but the last part
are on their way while the next is computed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from app.domain.errors import DjinnError, EngineError, PeerFull, WrongState
from app.domain.values import Tier
from app.gpu.commands.sessions import Sessions
from app.gpu.kv.placement import Placement
from app.gpu.kv.stream import PromptStreams
from app.gpu.state.moves import Move, Moved, MoveKind
from app.gpu.state.sequence import TokenSequence, TurnState
from app.messages import (
    ComputePrompt,
    Done,
    Event,
    Failed,
    Lacking,
    ReceivedPrompt,
    ReceivePrompt,
    SendPrompt,
    SentKV,
    Submit,
)


@dataclass(slots=True, eq=False)
class _Awaited:
    """A prompt that is to come, and the turn that it is for."""

    command: ReceivePrompt
    sequence: TokenSequence
    turn: TurnState
    given_up: bool = False
    """Whether its connection has been let go, although more could come."""

    @property
    def is_wanted(self) -> bool:
        """Whether the turn still waits for it."""
        return self.sequence.turn is self.turn


class PromptReceiver:
    """Holds turns back whose prompts another server computes. Each goes on once, with as much KV as has come."""

    def __init__(self, placement: Placement, transports: PromptStreams) -> None:
        self._placement = placement
        self._cache = placement.tiers.cache
        self._transports = transports
        self._waiting: list[_Awaited] = []
        """Those that the host makes room for."""
        self._coming: dict[Move, _Awaited] = {}

    def hold(self, sequence: TokenSequence, command: Submit) -> list[Event]:
        """Hold the turn that has just begun, if another server may compute its prompt and enough of it lacks KV: as
        much as the command says, and half of it. That server computes what was there before too.
        """
        turn, tokens = sequence.turn, len(sequence.tokens)
        may_ask = command.apart_tokens and command.sampling.prompt_logprobs is None
        if turn is None or not may_ask or not self._may_wait(sequence):
            return []
        most_known = tokens - 1 - max(command.apart_tokens, tokens // 2)
        # In this order: of most turns nearly all is known, and they need no look at what others have computed.
        if sequence.computed > most_known or self._cache.published(sequence) * self._cache.pool.block_size > most_known:
            return []
        if sequence.tier is None:
            self._cache.match_host_prefix(sequence)
        turn.awaits_prefill = True
        first = min(len(sequence.host_blocks), len(sequence.hashes))
        return [Lacking(sequence.session, turn.ticket, first)]

    def receive(self, sequence: TokenSequence, command: ReceivePrompt) -> list[Event]:
        """Begin to receive the prompt; `finish` answers. Raises `WrongState` if no turn waits for it."""
        turn = self._held(sequence, command)
        if turn is None:
            raise WrongState(f"session {command.session} waits for no prompt")
        self._waiting.append(_Awaited(command, sequence, turn))
        return self.go_on()

    def compute(self, command: ComputePrompt, sequences: Iterable[TokenSequence]) -> None:
        """Let the turn go on, unless it has ended. `sequences` has the session, if that is open."""
        for sequence in sequences:
            turn = self._held(sequence, command)
            if turn is not None:
                turn.awaits_prefill = False

    def go_on(self) -> list[Event]:
        """Receive those that there is room for now, and no more those whose turns have ended."""
        for awaited in self._coming.values():
            if not (awaited.is_wanted or awaited.given_up):
                awaited.given_up = True
                self._transports.end(awaited.command.connection)
        events: list[Event] = []
        waiting, self._waiting = self._waiting, []
        for awaited in waiting:
            error = self._begin(awaited)
            if error is not None:
                awaited.turn.awaits_prefill = False
                self._transports.end(awaited.command.connection)
                events.append(Failed(awaited.command.ticket, error))
        return events

    def finish(self, move: Move, report: Moved) -> list[Event]:
        """Let the turn go on for which no more comes, and answer the command."""
        awaited = self._coming.pop(move)
        awaited.turn.awaits_prefill, awaited.turn.coming = False, None
        came = max(0, report.computed - move.first * self._cache.pool.block_size)
        return [Done(awaited.command.ticket, ReceivedPrompt(came, report.error))]

    def _may_wait(self, sequence: TokenSequence) -> bool:
        """Whether KV that comes to the host is as good for the session as its own."""
        on_host = self._cache.host.num_blocks >= self._cache.pool.blocks_for(len(sequence.tokens))
        at_rest = sequence.moving is None and sequence.tier in (None, Tier.DEVICE, Tier.HOST)
        return on_host and at_rest and not sequence.watched and not sequence.guaranteed

    def _held(self, sequence: TokenSequence, command: ReceivePrompt | ComputePrompt) -> TurnState | None:
        """The turn that the command is for, if nothing comes for it yet."""
        turn = sequence.turn
        if turn is None or turn.ticket != command.turn or not turn.awaits_prefill or turn.coming is not None:
            return None
        return turn if all(each.turn is not turn for each in self._waiting) else None

    def _begin(self, awaited: _Awaited) -> DjinnError | None:
        """Begin to receive a prompt, or wait for room; returns why neither can be."""
        command, sequence = awaited.command, awaited.sequence
        if not awaited.is_wanted:
            return WrongState(f"session {command.session} waits for no prompt any more")
        host, hashes, computed = self._cache.host, self._cache.prompt_hashes(sequence), len(sequence.tokens) - 1
        needed = host.blocks_for(computed) - command.first
        if not self._placement.make_host_room(needed, sequence):
            if not self._placement.host_is_emptying:
                return PeerFull(f"host memory has no room for {needed} blocks of KV")
            self._waiting.append(awaited)
            return None
        awaited.turn.coming = self._placement.tiers.order(
            sequence,
            MoveKind.RECEIVE_PROMPT,
            target=tuple(host.allocate(needed)),
            first=command.first,
            hashes=tuple(hashes[command.first :]),
            token_ids=tuple(sequence.tokens[:computed]),
            connection=command.connection,
        )
        self._coming[awaited.turn.coming] = awaited
        return None


@dataclass(slots=True, eq=False)
class _Stream:
    """One prompt on its way to another server. Counts are in blocks."""

    command: SendPrompt
    sequence: TokenSequence
    sent: int
    end: int
    sending: bool = False
    """Whether the last of those that are `sent` may still be on their way."""
    bytes: int = 0


class PromptSender:
    """Sends the KV of prompts that are computed for other servers, between two steps."""

    def __init__(self, placement: Placement, sessions: Sessions, transports: PromptStreams) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._host = placement.tiers.cache.host
        self._sessions = sessions
        self._transports = transports
        self._streams: dict[int, _Stream] = {}
        """By the number of the connection."""

    def begin(self, sequence: TokenSequence, command: SendPrompt) -> list[Event]:
        """Begin to send the session's blocks; `go_on` and `finish` go on with it and answer. Raises `WrongState` if
        there are none to send.
        """
        end = self._host.blocks_for(len(sequence.tokens))
        if end <= command.first:
            raise WrongState(f"session {command.session} has no block to send")
        self._streams[command.connection] = _Stream(command, sequence, command.first, end)
        return self.go_on()

    def go_on(self) -> list[Event]:
        """Order copies and sends of what has been computed since the last look."""
        events: list[Event] = []
        for stream in tuple(self._streams.values()):
            if self._transports.is_gone(stream.command.connection):
                events += self._fail(stream, "the other server wants it no more")
            elif not stream.sending:
                events += self._advance(stream)
        return events

    def finish(self, move: Move, report: Moved) -> list[Event]:
        """Account for a part that has been sent, or not."""
        stream = self._streams.get(move.connection)
        if stream is None:
            return []
        stream.sending = False
        stream.bytes += report.sent_bytes
        if report.error is not None:
            return self._fail(stream, report.error)
        if stream.sent < stream.end:
            return []
        del self._streams[move.connection]
        tokens = len(stream.sequence.tokens)
        return [Done(stream.command.ticket, SentKV(tokens, tokens, stream.bytes))]

    def _advance(self, stream: _Stream) -> list[Event]:
        sequence = stream.sequence
        if sequence.session not in self._sessions:
            return self._fail(stream, "its session has been closed")
        # The last block is filled in part, and whole only when the turn is over.
        is_computed = not sequence.busy and sequence.computed == len(sequence.tokens)
        computed = stream.end if is_computed else sequence.computed // self._host.block_size
        on_device = sequence.tier is Tier.DEVICE and sequence.outgoing is None
        if on_device and len(sequence.host_blocks) < computed and not self._copy_out(sequence, computed):
            return self._fail(stream, "host memory has no room for its KV")
        ready = min(computed, len(sequence.host_blocks))
        if ready > stream.sent:
            self._send(stream, ready)
        elif not sequence.busy and (computed < stream.end or sequence.tier in (Tier.DISK, None)):
            return self._fail(stream, "the prompt was not computed to its end")
        return []

    def _copy_out(self, sequence: TokenSequence, end: int) -> bool:
        """Copy blocks to the host, or wait for room there. False: there will be none."""
        if self._tiers.copy_out(sequence, end):
            return True
        if self._placement.make_host_room(end - len(sequence.host_blocks), sequence):
            return self._tiers.copy_out(sequence, end)
        return self._placement.host_is_emptying

    def _send(self, stream: _Stream, ready: int) -> None:
        sequence, source = stream.sequence, tuple(stream.sequence.host_blocks[stream.sent : ready])
        self._host.share(source)
        self._tiers.order(
            sequence,
            MoveKind.SEND_PROMPT,
            source=source,
            token_ids=tuple(sequence.tokens),
            connection=stream.command.connection,
            ends=ready == stream.end,
        )
        stream.sent, stream.sending = ready, True

    def _fail(self, stream: _Stream, reason: str) -> list[Event]:
        del self._streams[stream.command.connection]
        self._transports.end(stream.command.connection)
        return [Failed(stream.command.ticket, EngineError(f"the prompt was not sent: {reason}"))]
