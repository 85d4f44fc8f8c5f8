"""Carrying out commands between two steps."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace

from app.domain.errors import Busy, FieldOutOfRange, NotFound, WrongState
from app.domain.values import FinishReason, Residency, SessionId
from app.gpu.commands.checkpoints import CheckpointHandler
from app.gpu.commands.inspection import Inspector
from app.gpu.commands.saved_files import FilesFound, SavedFiles
from app.gpu.commands.session_files import Transfers
from app.gpu.commands.turns import TurnHandler
from app.gpu.kv.moves import Moved, MoveKind
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.sequence import Sequence
from app.messages import (
    BreakpointCommand,
    CheckpointCommand,
    Close,
    Command,
    Done,
    Event,
    Export,
    Fork,
    Import,
    Inspect,
    Open,
    Placed,
    Restored,
    Rewind,
    SetPhase,
    TurnCommand,
)

RETRY_AFTER_S = 1


class CommandHandler:
    """Knows every open session's sequence. A command either is carried out whole or raises and changes nothing."""

    def __init__(
        self,
        scheduler: Scheduler,
        turns: Turns,
        checkpoints: CheckpointHandler,
        *,
        inspector: Inspector,
        files: FilesFound,
    ) -> None:
        self._scheduler = scheduler
        self._placement = scheduler.placement
        self._turns = turns
        self._checkpoints = checkpoints
        self._turn_handler = TurnHandler(scheduler, turns)
        self._inspector = inspector
        self._transfers = Transfers(scheduler.placement, turns.max_model_len)
        self._saved = SavedFiles(scheduler.placement, files)
        self._sequences: dict[SessionId, Sequence] = {}
        self._own_blocks = scheduler.cache.pool.num_blocks
        """Device blocks without those that weights lend, and take back."""

    @property
    def sequences(self) -> Collection[Sequence]:
        """Every open session's sequence."""
        return self._sequences.values()

    def handle(self, command: Command) -> list[Event]:
        """Carry out one command and answer it, or begin to. Raises DjinnError if the session or its state does not
        allow it.
        """
        if isinstance(command, TurnCommand):
            return self._turn_handler.handle(command, self._find(command.session))
        if isinstance(command, BreakpointCommand | CheckpointCommand):
            return [Done(command.ticket, self._checkpoints.handle(command, self._find(command.session)))]
        match command:
            case Open():
                return self._open(command)
            case Fork():
                return self._fork(command)
            case Rewind():
                return self._rewind(command)
            case SetPhase():
                return self._set_phase(command)
            case Export():
                self._transfers.export(command, self._find_resting(command.session))
                return []
            case Import():
                self._transfers.import_(command, Sequence(command.session, _namespace(command.namespace)))
                return []
            case Close():
                return self._close(command)
            case Restored():
                self._saved.delete_rest()
                return [Done(command.ticket)]
            case Inspect():
                return [Done(command.ticket, self._inspector.memory(self.sequences))]

    def placed(self) -> list[Event]:
        """Sessions whose KV has changed its place or size since the last call."""
        changed = self._placement.take_changed()
        return [Placed(s.session, self._inspector.session(s)) for s in changed if s.session in self._sequences]

    def moved(self, report: Moved) -> list[Event]:
        """Account for KV that has been moved."""
        move = self._placement.complete(report)
        events: list[Event] = []
        if move.kind in (MoveKind.EXPORT, MoveKind.IMPORT):
            events, imported = self._transfers.finish(move, report)
            if imported is not None:
                self._sequences[imported.session] = imported
                self._placement.end_turn(imported)
        self._transfers.go_on(move.session)
        return events

    def _open(self, command: Open) -> list[Event]:
        guaranteed = command.residency is Residency.GUARANTEED
        if guaranteed:
            self._check_reserve()
        sequence = Sequence(
            command.session,
            _namespace(command.namespace),
            guaranteed,
            list(command.token_ids),
            breakpoints={each.id: each for each in command.breakpoints},
            interventions=InterventionLog(command.interventions),
        )
        sequence.assume_computed()
        self._saved.claim(sequence)
        self._placement.end_turn(sequence)
        self._sequences[command.session] = sequence
        return [Done(command.ticket)]

    def _check_reserve(self) -> None:
        """Raise `Busy` unless one more session can have a full context set aside, and one context be left for all
        others.
        """
        context = self._scheduler.cache.pool.blocks_for(self._turns.max_model_len)
        reserved = sum(sequence.guaranteed for sequence in self.sequences)
        if (reserved + 2) * context > self._own_blocks:
            raise Busy(
                f"the device has room to guarantee {max(0, self._own_blocks // context - 1)} sessions of "
                f"{self._turns.max_model_len} tokens, and {reserved} are open",
                retry_after_s=RETRY_AFTER_S,
                param="residency",
            )

    def _set_phase(self, command: SetPhase) -> list[Event]:
        sequence = self._find_resting(command.session)
        resume_in_s = None if command.resume_in_ms is None else command.resume_in_ms / 1000
        self._placement.phases.signal(sequence, command.phase, resume_in_s)
        return [Done(command.ticket)]

    def _fork(self, command: Fork) -> list[Event]:
        parent = self._find_resting(command.session)
        if (parent.turn is None) != (command.turn is None):
            raise WrongState(f"session {command.session} is {'idle' if parent.turn is None else 'paused'}")
        child = self._scheduler.cache.fork(parent, command.child)
        if parent.turn is not None and command.turn is not None:
            child.turn = replace(parent.turn, ticket=command.turn, prompt_logprobs=list(parent.turn.prompt_logprobs))
        self._sequences[command.child] = child
        self._scheduler.retire(child)
        return [Done(command.ticket, len(child.tokens))]

    def _rewind(self, command: Rewind) -> list[Event]:
        sequence = self._find_idle(command.session)
        if not 0 <= command.to_token <= len(sequence.tokens):
            raise FieldOutOfRange(
                f"to_token is {command.to_token}; the session has {len(sequence.tokens)} tokens",
                param="to_token",
            )
        self._placement.tiers.truncate(sequence, command.to_token)
        self._scheduler.retire(sequence)
        self._placement.phases.repeat(sequence)
        return [Done(command.ticket, len(sequence.tokens))]

    def _close(self, command: Close) -> list[Event]:
        sequence = self._find(command.session)
        events: list[Event] = []
        if sequence.turn is not None:
            events.append(self._turns.end(sequence, sequence.turn, FinishReason.CANCELLED))
        self._scheduler.forget(sequence)
        self._placement.close(sequence)
        del self._sequences[command.session]
        return [*events, Done(command.ticket)]

    def _find(self, session: SessionId) -> Sequence:
        if session not in self._sequences:
            raise NotFound(f"there is no session {session}")
        return self._sequences[session]

    def _find_idle(self, session: SessionId) -> Sequence:
        sequence = self._find_resting(session)
        if sequence.turn is not None:
            raise WrongState(f"session {session} is paused")
        return sequence

    def _find_resting(self, session: SessionId) -> Sequence:
        """The session of that id, idle or paused."""
        sequence = self._find(session)
        if sequence.busy:
            raise WrongState(f"session {session} is running a turn")
        return sequence


def _namespace(name: str) -> bytes:
    """First parent of the chain of block hashes."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
