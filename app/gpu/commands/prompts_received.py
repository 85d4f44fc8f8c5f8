"""Turns whose prompts another server computes: they wait for the KV, and go on with as much of it as comes."""

from dataclasses import dataclass

from app.domain.errors import DjinnError, PeerFull, WrongState
from app.domain.values import Tier
from app.gpu.kv.placement import Placement
from app.gpu.kv.stream import PromptStreams
from app.gpu.state.moves import Move, Moved, MoveKind
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState
from app.messages import ComputePrompt, Done, Event, Failed, Lacking, ReceivedPrompt, ReceivePrompt, Submit


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
    """Holds turns back, and lets each go on once."""

    def __init__(self, placement: Placement, ways: PromptStreams) -> None:
        self._placement = placement
        self._cache = placement.tiers.cache
        self._ways = ways
        self._waiting: list[_Awaited] = []
        """Those that the host makes room for."""
        self._coming: dict[Move, _Awaited] = {}

    def hold(self, sequence: TokenSequence, command: Submit) -> list[Event]:
        """Hold the turn that has just begun, if another server may compute its prompt and enough of it lacks KV: as
        much as was asked for, and half of it. That server computes what was there before too.
        """
        turn, tokens = sequence.turn, len(sequence.tokens)
        asks = command.apart_tokens and command.sampling.prompt_logprobs is None
        if turn is None or not asks or not self._may_wait(sequence):
            return []
        most_known = tokens - 1 - max(command.apart_tokens, tokens // 2)
        # In this order: of most turns nearly all is known, and they need no look at what others have computed.
        if sequence.computed > most_known or self._cache.published(sequence) * self._cache.pool.block_size > most_known:
            return []
        if sequence.tier is None:
            self._cache.match_host_prefix(sequence)
        turn.apart = True
        first = min(len(sequence.host_blocks), len(sequence.hashes))
        return [Lacking(sequence.session, turn.ticket, first)]

    def receive(self, sequence: TokenSequence, command: ReceivePrompt) -> list[Event]:
        """Begin to receive the prompt; `finish` answers. Raises `WrongState` if no turn waits for it."""
        turn = self._held(sequence, command)
        if turn is None:
            self._ways.end(command.connection)
            raise WrongState(f"session {command.session} waits for no prompt")
        self._waiting.append(_Awaited(command, sequence, turn))
        return self.go_on()

    def compute(self, sequence: TokenSequence, command: ComputePrompt) -> None:
        """Let the turn go on, unless it has ended."""
        turn = self._held(sequence, command)
        if turn is not None:
            turn.apart = False

    def go_on(self) -> list[Event]:
        """Receive those that there is room for now, and no more those whose turns have ended."""
        for awaited in self._coming.values():
            if not (awaited.is_wanted or awaited.given_up):
                awaited.given_up = True
                self._ways.end(awaited.command.connection)
        events: list[Event] = []
        waiting, self._waiting = self._waiting, []
        for awaited in waiting:
            error = self._begin(awaited)
            if error is not None:
                awaited.turn.apart = False
                self._ways.end(awaited.command.connection)
                events.append(Failed(awaited.command.ticket, error))
        return events

    def finish(self, move: Move, report: Moved) -> list[Event]:
        """Let the turn go on for which no more comes, and answer the command."""
        awaited = self._coming.pop(move)
        awaited.turn.apart, awaited.turn.coming = False, None
        came = max(0, report.computed - move.first * self._cache.pool.block_size)
        return [Done(awaited.command.ticket, ReceivedPrompt(came, report.error))]

    def _may_wait(self, sequence: TokenSequence) -> bool:
        """Whether KV that comes to the host is as good for the session as its own."""
        on_host = self._cache.host.num_blocks >= self._cache.pool.blocks_for(len(sequence.tokens))
        at_rest = sequence.moving is None and sequence.tier in (None, Tier.DEVICE, Tier.HOST)
        return on_host and at_rest and not sequence.watched and not sequence.guaranteed

    def _held(self, sequence: TokenSequence, command: ReceivePrompt | ComputePrompt) -> TurnState | None:
        """The turn that the command is for, if it waits for a remote prefill."""
        turn = sequence.turn
        is_held = turn is not None and turn.ticket == command.turn and turn.apart and turn.coming is None
        return turn if is_held and all(each.turn is not turn for each in self._waiting) else None

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
