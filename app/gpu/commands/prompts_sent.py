"""Prompts that are computed for another server: their KV goes there part by part, as it is computed.

A part is what one step computes. It is not sent layer by layer: a block is one run of bytes over all layers, and the
layers of a step run without a stop between them. So all but the last part are on their way while the next is computed.
"""

from dataclasses import dataclass

from app.domain.errors import EngineError, WrongState
from app.domain.values import Tier
from app.gpu.commands.sessions import SessionHandler
from app.gpu.kv.placement import Placement
from app.gpu.kv.stream import PromptStreams
from app.gpu.state.moves import Move, Moved, MoveKind
from app.gpu.state.sequence import TokenSequence
from app.messages import Done, Event, Failed, SendPrompt, SentKV


@dataclass(slots=True, eq=False)
class _Stream:
    """One prompt on its way. Counts are in blocks."""

    command: SendPrompt
    sequence: TokenSequence
    sent: int
    end: int
    sending: bool = False
    """Whether the last of those that are `sent` may still be on their way."""
    bytes: int = 0


class PromptSender:
    """Sends what is computed, between two steps."""

    def __init__(self, placement: Placement, sessions: SessionHandler, ways: PromptStreams) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._host = placement.tiers.cache.host
        self._sessions = sessions
        self._ways = ways
        self._streams: dict[int, _Stream] = {}
        """By the number of the connection."""

    def begin(self, sequence: TokenSequence, command: SendPrompt) -> list[Event]:
        """Begin to send the session's blocks; `go_on` and `finish` go on with it and answer. Raises `WrongState` if
        there are none to send.
        """
        end = self._host.blocks_for(len(sequence.tokens))
        if end <= command.first:
            self._ways.end(command.connection)
            raise WrongState(f"session {command.session} has no block to send")
        self._streams[command.connection] = _Stream(command, sequence, command.first, end)
        return self.go_on()

    def go_on(self) -> list[Event]:
        """Order copies and sends of what has been computed since the last look."""
        events: list[Event] = []
        for stream in tuple(self._streams.values()):
            if self._ways.is_gone(stream.command.connection):
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
        computed = stream.end if self._is_computed(sequence) else sequence.computed // self._host.block_size
        on_device = sequence.tier is Tier.DEVICE and sequence.outgoing is None
        if on_device and len(sequence.host_blocks) < computed and not self._copy_out(sequence, computed):
            return self._fail(stream, "host memory has no room for its KV")
        ready = min(computed, len(sequence.host_blocks))
        if ready > stream.sent:
            self._send(stream, ready)
        elif not sequence.busy and (computed < stream.end or sequence.tier in (Tier.DISK, None)):
            return self._fail(stream, "the prompt was not computed to its end")
        return []

    def _is_computed(self, sequence: TokenSequence) -> bool:
        """Whether the turn has come to its end."""
        return not sequence.busy and sequence.computed == len(sequence.tokens)

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
        self._ways.end(stream.command.connection)
        return [Failed(stream.command.ticket, EngineError(f"the prompt was not sent: {reason}"))]
