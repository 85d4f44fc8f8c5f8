"""Carrying out commands about a whole session."""

import hashlib
from collections.abc import Collection

from app.domain.errors import Busy, FieldOutOfRange, NotFound, WrongState
from app.domain.values import FinishReason, Residency, SessionId
from app.gpu.commands.saved_files import SavedFiles
from app.gpu.kv.phases import Phases
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.sequence import TokenSequence
from app.messages import Close, Event, Fork, Open, Rewind, SetPhase

RETRY_AFTER_S = 1


class SessionHandler:
    """Knows every open session's sequence. A command either is carried out whole or raises and changes nothing."""

    def __init__(self, scheduler: Scheduler, phases: Phases, turns: Turns, saved: SavedFiles) -> None:
        self._scheduler = scheduler
        self._placement = scheduler.placement
        self._phases = phases
        self._turns = turns
        self._activations = turns.activations
        self._saved = saved
        self._sequences: dict[SessionId, TokenSequence] = {}
        self._own_blocks = scheduler.cache.pool.num_blocks
        """Device blocks without those that weights lend, and take back."""

    @property
    def sequences(self) -> Collection[TokenSequence]:
        """Every open session's sequence."""
        return self._sequences.values()

    def __contains__(self, session: SessionId) -> bool:
        return session in self._sequences

    def find(self, session: SessionId) -> TokenSequence:
        """The session of that id. Raises `NotFound`."""
        if session not in self._sequences:
            raise NotFound(f"there is no session {session}")
        return self._sequences[session]

    def find_resting(self, session: SessionId) -> TokenSequence:
        """The session of that id, idle or paused. Raises `NotFound`, `WrongState`."""
        sequence = self.find(session)
        if sequence.busy:
            raise WrongState(f"session {session} is running a turn")
        return sequence

    def open(self, command: Open) -> None:
        """Make a session known, with the KV of its file. Raises `Busy` if no more residency can be guaranteed."""
        guaranteed = command.residency is Residency.GUARANTEED
        if guaranteed:
            self._check_reserve()
        sequence = TokenSequence(
            command.session,
            namespace_hash(command.tenant if command.namespace is None else command.namespace),
            guaranteed,
            list(command.token_ids),
            tenant=command.tenant,
            breakpoints={each.id: each for each in command.breakpoints},
            interventions=InterventionLog(command.interventions),
        )
        sequence.assume_computed()
        self._saved.claim(sequence)
        self.add(sequence)

    def add(self, sequence: TokenSequence) -> None:
        """Make a session without a turn known."""
        self._placement.end_turn(sequence)
        self._sequences[sequence.session] = sequence

    def require_place(self, session: SessionId, *, guaranteed: bool) -> None:
        """Raise `WrongState` if the session is here already, and what `open` raises if its residency cannot be
        guaranteed.
        """
        if session in self._sequences:
            raise WrongState(f"session {session} is here already")
        if guaranteed:
            self._check_reserve()

    def set_phase(self, command: SetPhase) -> None:
        """Note what the client says of its session. Raises `NotFound`, `WrongState`."""
        sequence = self.find_resting(command.session)
        resume_in_s = None if command.resume_in_ms is None else command.resume_in_ms / 1000
        self._phases.signal(sequence, command.phase, resume_in_s)

    def fork(self, command: Fork) -> int:
        """Open the child; returns the number of its tokens. Raises `NotFound`, `WrongState`, `ActivationsFull`."""
        parent = self.find_resting(command.session)
        if (parent.turn is None) != (command.turn is None):
            raise WrongState(f"session {command.session} is {'idle' if parent.turn is None else 'paused'}")
        if parent.checkpoint is not None:
            self._activations.check(parent, parent.checkpoint.hidden.nbytes, besides=True)
        child = self._scheduler.cache.fork(parent, command.child)
        self._activations.note(child)
        if parent.turn is not None and command.turn is not None:
            child.turn = parent.turn.fork(command.turn)
        self.add(child)
        return len(child.tokens)

    def rewind(self, command: Rewind) -> int:
        """Cut the history; returns the number of tokens left. Raises `NotFound`, `WrongState`, `FieldOutOfRange`."""
        sequence = self.find_resting(command.session)
        if sequence.turn is not None:
            raise WrongState(f"session {command.session} is paused")
        if not 0 <= command.to_token <= len(sequence.tokens):
            raise FieldOutOfRange(
                f"to_token is {command.to_token}; the session has {len(sequence.tokens)} tokens", param="to_token"
            )
        self._placement.tiers.truncate(sequence, command.to_token)
        self._placement.end_turn(sequence)
        self._phases.repeat(sequence)
        return len(sequence.tokens)

    def close(self, command: Close) -> list[Event]:
        """Forget the session; returns the end of its turn if it has one. Raises `NotFound`."""
        sequence = self.find(command.session)
        events: list[Event] = []
        if sequence.turn is not None:
            events.append(self._turns.end(sequence, sequence.turn, FinishReason.CANCELLED))
        self._phases.forget(sequence)
        self._activations.forget(sequence)
        self._placement.close(sequence)
        del self._sequences[command.session]
        return events

    def _check_reserve(self) -> None:
        """Raise `Busy` unless one more session can have a full context set aside, and one context be left for all
        others; `FieldOutOfRange` if the device is too small for any.
        """
        pool = self._scheduler.cache.pool
        context, block_size = pool.blocks_for(self._turns.max_model_len), pool.block_size
        reserved = sum(sequence.guaranteed for sequence in self.sequences)
        if 2 * context > self._own_blocks:
            raise FieldOutOfRange(
                f"residency cannot be guaranteed: the device has KV for {self._own_blocks * block_size} tokens, not "
                f"two contexts of {self._turns.max_model_len}; the server needs a larger --kv-device",
                param="residency",
            )
        if (reserved + 2) * context > self._own_blocks:
            raise Busy(
                f"the device has room to guarantee {self._own_blocks // context - 1} sessions of "
                f"{self._turns.max_model_len} tokens, and {reserved} are open",
                retry_after_s=RETRY_AFTER_S,
                param="residency",
            )


def namespace_hash(name: str) -> bytes:
    """First parent of the chain of block hashes."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
