"""Carrying out commands between two steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from app.domain import FinishReason, SessionId
from app.errors import ContextTooLong, FieldOutOfRange, MalformedRequest, NotFound, WrongState
from app.gpu.scheduler import Scheduler
from app.gpu.sequence import Sequence, common_prefix
from app.gpu.turns import Turns
from app.messages import (
    Cancel,
    Close,
    Command,
    Done,
    Event,
    Fork,
    Inspect,
    MemoryMap,
    Open,
    Rewind,
    SessionMemory,
    Submit,
)


class CommandHandler:
    """Knows every open session's sequence. A command either is carried out whole or raises and changes nothing."""

    def __init__(self, scheduler: Scheduler, turns: Turns, *, text_bytes: int, block_bytes: int) -> None:
        self._scheduler = scheduler
        self._turns = turns
        self._text_bytes = text_bytes
        self._block_bytes = block_bytes
        self._sequences: dict[SessionId, Sequence] = {}

    @property
    def sequences(self) -> Iterable[Sequence]:
        """Every open session's sequence."""
        return self._sequences.values()

    def handle(self, command: Command) -> list[Event]:
        """Carry out one command and answer it. Raises DjinnError if the session or its state does not allow it."""
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
            case Close():
                return self._close(command)
            case Inspect():
                return [Done(command.ticket, self._inspect(command.session))]

    def _open(self, command: Open) -> list[Event]:
        namespace = hashlib.blake2b(command.namespace.encode(), digest_size=16).digest()
        self._sequences[command.session] = Sequence(command.session, namespace)
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
            self._scheduler.cache.truncate(sequence, prompt_tokens + keep)

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
        self._scheduler.cache.truncate(sequence, command.to_token)
        self._scheduler.retire(sequence)
        return [Done(command.ticket, len(sequence.tokens))]

    def _close(self, command: Close) -> list[Event]:
        sequence = self._find(command.session)
        events: list[Event] = []
        if sequence.turn is not None:
            events.append(self._turns.end(sequence, FinishReason.CANCELLED))
        self._scheduler.cache.uncompute(sequence, 0)
        self._scheduler.forget(sequence)
        del self._sequences[command.session]
        return [*events, Done(command.ticket)]

    def _inspect(self, session: SessionId | None) -> SessionMemory | MemoryMap:
        if session is not None:
            sequence = self._find(session)
            held = len(sequence.blocks)
            return SessionMemory(len(sequence.tokens), sequence.computed, held, held * self._block_bytes)
        pool, scheduler = self._scheduler.cache.pool, self._scheduler
        return MemoryMap(
            text_bytes=self._text_bytes,
            kv_total_bytes=pool.num_blocks * self._block_bytes,
            kv_owned_bytes=pool.owned * self._block_bytes,
            kv_cached_bytes=pool.cached * self._block_bytes,
            block_bytes=self._block_bytes,
            block_tokens=pool.block_size,
            sessions=len(self._sequences),
            sessions_resident=sum(1 for sequence in self._sequences.values() if sequence.blocks),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
        )

    def _find(self, session: SessionId) -> Sequence:
        if session not in self._sequences:
            raise NotFound(f"there is no session {session}")
        return self._sequences[session]

    def _find_idle(self, session: SessionId) -> Sequence:
        sequence = self._find(session)
        if sequence.turn is not None:
            raise WrongState(f"session {session} is running a turn")
        return sequence
