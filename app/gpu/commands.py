"""Carrying out commands between two steps."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from app.domain import FinishReason, Residency, SessionId
from app.errors import Busy, ContextTooLong, FieldOutOfRange, MalformedRequest, NotFound, WrongState
from app.gpu.inspection import Inspector
from app.gpu.kv_moves import Moved, MoveKind
from app.gpu.saved_files import FilesFound, SavedFiles
from app.gpu.scheduler import Scheduler
from app.gpu.sequence import Sequence, common_prefix
from app.gpu.transfers import Transfers
from app.gpu.turns import Turns
from app.messages import (
    Cancel,
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
    Submit,
)

RETRY_AFTER_S = 1


class CommandHandler:
    """Knows every open session's sequence. A command either is carried out whole or raises and changes nothing."""

    def __init__(self, scheduler: Scheduler, turns: Turns, *, text_bytes: int, files: FilesFound) -> None:
        self._scheduler = scheduler
        self._placement = scheduler.placement
        self._turns = turns
        self._inspector = Inspector(scheduler, text_bytes)
        self._transfers = Transfers(scheduler.placement, turns.max_model_len)
        self._saved = SavedFiles(scheduler.placement, files)
        self._sequences: dict[SessionId, Sequence] = {}

    @property
    def sequences(self) -> Collection[Sequence]:
        """Every open session's sequence."""
        return self._sequences.values()

    def handle(self, command: Command) -> list[Event]:
        """Carry out one command and answer it, or begin to. Raises DjinnError if the session or its state does not
        allow it.
        """
        match command:
            case Open():
                return self._open(command)
            case Submit():
                return self._submit(command)
            case Cancel():
                return self._cancel(command)
            case Fork():
                return self._fork(command)
            case Rewind():
                return self._rewind(command)
            case SetPhase():
                return self._set_phase(command)
            case Export():
                self._transfers.export(command, self._find_idle(command.session))
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
        sequence = Sequence(command.session, _namespace(command.namespace), guaranteed, list(command.token_ids))
        sequence.reached = len(sequence.tokens)
        self._saved.claim(sequence)
        self._placement.end_turn(sequence)
        self._sequences[command.session] = sequence
        return [Done(command.ticket)]

    def _check_reserve(self) -> None:
        """Raise `Busy` unless one more session can have a full context set aside, and one context be left for all
        others.
        """
        pool = self._scheduler.cache.pool
        context = pool.blocks_for(self._turns.max_model_len)
        reserved = sum(sequence.guaranteed for sequence in self.sequences)
        if (reserved + 2) * context > pool.num_blocks:
            raise Busy(
                f"the device has room to guarantee {max(0, pool.num_blocks // context - 1)} sessions of "
                f"{self._turns.max_model_len} tokens, and {reserved} are open",
                retry_after_s=RETRY_AFTER_S,
                param="residency",
            )

    def _set_phase(self, command: SetPhase) -> list[Event]:
        sequence = self._find_idle(command.session)
        resume_in_s = None if command.resume_in_ms is None else command.resume_in_ms / 1000
        self._placement.phases.signal(sequence, command.phase, resume_in_s)
        return [Done(command.ticket)]

    def _submit(self, command: Submit) -> list[Event]:
        sequence = self._find(command.session)
        if sequence.turn is not None:
            raise WrongState(f"session {command.session} is running a turn")
        keep = common_prefix(sequence.tokens, command.token_ids) if command.replace else len(sequence.tokens)
        length = len(command.token_ids) if command.replace else keep + len(command.token_ids)
        if length == 0:
            raise MalformedRequest("the session has no tokens yet and the request brings none")
        limit = self._turns.max_model_len
        if length + min(1, command.stop.max_tokens) > limit:
            raise ContextTooLong(f"the context would have {length} tokens; at most {limit} fit, one of them generated")
        self._turns.begin(sequence, command, keep)
        return []

    def _cancel(self, command: Cancel) -> list[Event]:
        sequence = self._find(command.session)
        if sequence.turn is not None and sequence.turn.ticket == command.turn:
            self._keep(sequence, sequence.turn.prompt_tokens, command.keep)
            return [self._turns.end(sequence, command.reason), Done(command.ticket, len(sequence.tokens))]
        if sequence.turn is None and sequence.last_turn is not None and sequence.last_turn[0] == command.turn:
            self._keep(sequence, sequence.last_turn[1], command.keep)
            self._scheduler.retire(sequence)
        return [Done(command.ticket, len(sequence.tokens))]

    def _keep(self, sequence: Sequence, prompt_tokens: int, keep: int | None) -> None:
        if keep is not None:
            self._placement.tiers.truncate(sequence, prompt_tokens + keep)

    def _fork(self, command: Fork) -> list[Event]:
        child = self._scheduler.cache.fork(self._find_idle(command.session), command.child)
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
            events.append(self._turns.end(sequence, FinishReason.CANCELLED))
        self._scheduler.forget(sequence)
        self._placement.close(sequence)
        del self._sequences[command.session]
        return [*events, Done(command.ticket)]

    def _find(self, session: SessionId) -> Sequence:
        if session not in self._sequences:
            raise NotFound(f"there is no session {session}")
        return self._sequences[session]

    def _find_idle(self, session: SessionId) -> Sequence:
        sequence = self._find(session)
        if sequence.turn is not None:
            raise WrongState(f"session {session} is running a turn")
        return sequence


def _namespace(name: str) -> bytes:
    """First parent of the chain of block hashes."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
