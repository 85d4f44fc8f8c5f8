"""Carrying out commands about a session's turn."""

from __future__ import annotations

import time

from app.domain.errors import ContextTooLong, MalformedRequest, WrongState
from app.domain.histories import common_prefix
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns
from app.gpu.state.sequence import Sequence
from app.messages import Cancel, Done, Event, Resume, Submit
from app.messages.turn_commands import TurnCommand


class TurnHandler:
    """Begins, resumes and cancels turns. A command either is carried out whole or raises and changes nothing."""

    def __init__(self, scheduler: Scheduler, turns: Turns) -> None:
        self._scheduler = scheduler
        self._turns = turns

    def handle(self, command: TurnCommand, sequence: Sequence) -> list[Event]:
        """Carry out a command on its session. Raises DjinnError."""
        match command:
            case Submit():
                return self._submit(command, sequence)
            case Resume():
                return self._resume(command, sequence)
            case Cancel():
                return self._cancel(command, sequence)

    def _submit(self, command: Submit, sequence: Sequence) -> list[Event]:
        if sequence.turn is not None:
            doing = "paused" if sequence.turn.paused else "running a turn"
            raise WrongState(f"session {command.session} is {doing}")
        if command.replace:
            keep, length = common_prefix(tuple(sequence.tokens), command.token_ids), len(command.token_ids)
        else:
            keep, length = len(sequence.tokens), len(sequence.tokens) + len(command.token_ids)
        if length == 0:
            raise MalformedRequest("the session has no tokens yet and the request brings none")
        limit = self._turns.max_model_len
        if length + min(1, command.stop.max_tokens) > limit:
            raise ContextTooLong(f"the context would have {length} tokens; at most {limit} fit, one of them generated")
        self._turns.begin(sequence, command, keep)
        return []

    def _resume(self, command: Resume, sequence: Sequence) -> list[Event]:
        turn, checkpoint = sequence.turn, sequence.checkpoint
        if turn is None or checkpoint is None or not turn.paused:
            raise WrongState(f"session {command.session} is not paused")
        began = time.perf_counter()
        self._turns.resume(sequence, turn, checkpoint, command.ticket, command.until)
        checkpoint.dispatch_ms = (time.perf_counter() - began) * 1000
        return []

    def _cancel(self, command: Cancel, sequence: Sequence) -> list[Event]:
        turn = sequence.turn
        if turn is not None and turn.ticket == command.turn:
            self._keep(sequence, turn.prompt_tokens, command.keep)
            return [self._turns.end(sequence, turn, command.reason), Done(command.ticket, len(sequence.tokens))]
        if turn is None and sequence.last_turn is not None and sequence.last_turn[0] == command.turn:
            self._keep(sequence, sequence.last_turn[1], command.keep)
            self._scheduler.retire(sequence)
        return [Done(command.ticket, len(sequence.tokens))]

    def _keep(self, sequence: Sequence, prompt_tokens: int, keep: int | None) -> None:
        if keep is not None:
            self._scheduler.placement.tiers.truncate(sequence, prompt_tokens + keep)
