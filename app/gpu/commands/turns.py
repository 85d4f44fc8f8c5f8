"""Carrying out commands about a session's turn."""

import time

from app.domain.errors import ContextTooLong, MalformedRequest, WrongState
from app.domain.histories import common_prefix
from app.gpu.commands.prompts_received import PromptReceiver
from app.gpu.kv.phases import Phases
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns
from app.gpu.state.sequence import TokenSequence
from app.messages import Cancel, Done, Event, Resume, Submit


class TurnHandler:
    """Begins, resumes and cancels turns."""

    def __init__(self, scheduler: Scheduler, phases: Phases, turns: Turns, prompts: PromptReceiver) -> None:
        self._scheduler = scheduler
        self._prompts = prompts
        self._phases = phases
        self._turns = turns

    def submit(self, sequence: TokenSequence, command: Submit) -> list[Event]:
        """Begin a turn, whose end is the answer. Raises `WrongState`, `MalformedRequest`, `ContextTooLong`."""
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
        self._phases.forget(sequence)
        self._turns.begin(sequence, command, keep)
        return self._prompts.hold(sequence, command)

    def resume(self, sequence: TokenSequence, command: Resume) -> list[Event]:
        """Let a paused turn go on; its end is the answer. Raises `WrongState`, `FieldOutOfRange`."""
        turn, checkpoint = sequence.turn, sequence.checkpoint
        if turn is None or checkpoint is None or not turn.paused:
            raise WrongState(f"session {command.session} is not paused")
        began = time.perf_counter()
        self._turns.resume(sequence, turn, checkpoint, command.ticket, command.until)
        self._phases.forget(sequence)
        checkpoint.dispatch_ms = (time.perf_counter() - began) * 1000
        return []

    def cancel(self, sequence: TokenSequence, command: Cancel) -> list[Event]:
        """End the turn. If it has just ended by itself, only cut the history."""
        turn = sequence.turn
        if turn is not None and turn.ticket == command.turn:
            self._keep(sequence, turn.prompt_tokens, command.keep)
            return [self._turns.end(sequence, turn, command.reason), Done(command.ticket, len(sequence.tokens))]
        if turn is None and sequence.last_turn is not None and sequence.last_turn[0] == command.turn:
            self._keep(sequence, sequence.last_turn[1], command.keep)
            self._scheduler.retire(sequence)
        return [Done(command.ticket, len(sequence.tokens))]

    def _keep(self, sequence: TokenSequence, prompt_tokens: int, keep: int | None) -> None:
        if keep is not None:
            self._scheduler.placement.tiers.truncate(sequence, prompt_tokens + keep)
