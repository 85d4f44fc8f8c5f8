"""Paused turns: what they have left is read and changed, and each pause ends, if by nobody else then by its timeout."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from app.bridge.turn import Turn
from app.domain.activations import Activation, CheckpointInfo, LensPosition, PausedTurn
from app.domain.breakpoints import NEXT_BREAKPOINT, Edit, OnTimeout, Positions, TensorData, Until
from app.domain.errors import DjinnError, Draining, FieldOutOfRange
from app.domain.values import FinishReason, SessionState
from app.messages import EditCheckpoint, Fork, Lens, ReadCheckpoint, ReadPaused, Reinstate, Resume, WriteCheckpoint
from app.sessions.pause import Pause, PausedPlace, PauseLimit
from app.sessions.session import Session
from app.sessions.turns import SessionTurns
from app.text.tokenizer import Tokens
from app.text.turn_reader import TextRule, TurnReader

logger = logging.getLogger(__name__)

MAX_LENS_POSITIONS = 64
"""In one call: everybody waits while the head is applied to them."""


class Pauses:
    """The pauses of all sessions. Used on the event loop only.

    All that is done to a session's checkpoint raises `WrongState` unless the session is paused.
    """

    def __init__(self, turns: SessionTurns, tokens: Tokens) -> None:
        self._turns = turns
        self._executor = turns.executor
        self._tokens = tokens
        self._reading: set[asyncio.Task[None]] = set()
        """Reads turns that a timeout has resumed."""
        turns.on_paused = self._begin

    def reader(self, session: Session, turn: Turn, rule: TextRule) -> TurnReader:
        """Read the session's turn from now on."""
        on_stop = partial(self._turns.cancel, session, turn, reason=FinishReason.STOP)
        settled = partial(self._turns.settled, session)
        session.reader = TurnReader(turn, self._tokens, rule, on_stop, settled)
        return session.reader

    async def read(self, session: Session, positions: Positions) -> Activation:
        """The checkpoint's residual stream. Raises `FieldOutOfRange` for positions that are not in it."""
        require_pause(session, to="read the checkpoint")
        found: Activation = await self._executor.call(lambda ticket: ReadCheckpoint(ticket, session.id, positions))
        return found

    async def edit(self, session: Session, edits: tuple[Edit, ...]) -> None:
        """Change the checkpoint, by all of `edits` or none. Raises `FieldOutOfRange`."""
        require_pause(session, to="edit the checkpoint")
        await self._executor.call(lambda ticket: EditCheckpoint(ticket, session.id, edits))

    async def write(self, session: Session, tensor: TensorData) -> None:
        """Put `tensor` in the place of the checkpoint's residual stream. Raises `FieldOutOfRange`."""
        require_pause(session, to="write the checkpoint")
        await self._executor.call(lambda ticket: WriteCheckpoint(ticket, session.id, tensor))

    async def lens(self, session: Session, positions: Positions, top_k: int) -> tuple[LensPosition, ...]:
        """The `top_k` tokens that the final norm and the head make of the checkpoint.

        Raises `FieldOutOfRange` for positions that are not in it, and for more than `MAX_LENS_POSITIONS`.
        """
        _check_lens(require_pause(session, to="read the checkpoint").info, positions)
        found: tuple[LensPosition, ...] = await self._executor.call(
            lambda ticket: Lens(ticket, session.id, positions, top_k)
        )
        return found

    def resume(self, session: Session, until: Until) -> TurnReader:
        """Go on with the turn; returns the reader of what is to come. Whoever resumes a turn must `release` it.

        Raises `WrongState` unless the session is paused, `Draining`, `FieldOutOfRange` for a layer that is passed.
        """
        self.check_until(session, until)
        if self._turns.draining:
            raise Draining("the server is shutting down")
        reader = session.reader
        assert reader is not None
        self._executor.resume_turn(reader.turn, lambda ticket: Resume(ticket, session.id, until))
        reader.turn.readers += 1
        session.resume()
        return reader

    def check_until(self, session: Session, until: Until) -> None:
        """Raise what `resume` would raise of the session's state and of `until`, before anything is changed."""
        layer, last = require_pause(session, to="resume").info.layer, self._turns.info.num_layers - 1
        if until.layer is not None and not layer < until.layer <= last:
            raise FieldOutOfRange(
                f"until.layer: {until.layer} must be above {layer}, where the session is paused, and at most {last}",
                param="until.layer",
            )

    def _begin(self, session: Session, info: CheckpointInfo) -> None:
        """Take note of the pause that the session has just come to. One that `until` made may last as long as the one
        before it.
        """
        made_by = (session.breakpoints | session.spent).get(info.breakpoint or "")
        if made_by is not None:
            session.pause_limit = PauseLimit(made_by.timeout_s, made_by.on_timeout)
        self._wait(session, info)

    def place(self, session: Session) -> PausedPlace | None:
        """What another session needs to be paused where this one is; None if it is not paused."""
        if session.pause is None:
            return None
        reader = session.reader
        assert reader is not None
        return PausedPlace(
            info=session.pause.info,
            limit=session.pause_limit,
            rule=reader.rule,
            before=session.settled_history[:],
            prompt_tokens=session.prompt_tokens,
            logprobs=tuple(reader.all_logprobs),
        )

    async def fork(self, session: Session, child: Session, place: PausedPlace) -> None:
        """Make `child` a session that is paused there, where `session` is."""
        turn = await self._executor.call_for_turn(
            lambda ticket, turn: Fork(ticket, session.id, child.id, turn), self._turns.observer(child)
        )
        self._take_up(child, turn, place)

    async def export(self, session: Session) -> PausedTurn | None:
        """The session's turn as it can go on elsewhere; None if it is not paused."""
        if session.pause is None:
            return None
        found: PausedTurn = await self._executor.call(lambda ticket: ReadPaused(ticket, session.id))
        return found

    async def reinstate(self, session: Session, paused: PausedTurn, place: PausedPlace) -> None:
        """Give a session that is being imported its breakpoints, its interventions, and a turn that is paused."""
        breakpoints = tuple(session.breakpoints.values())
        turn = await self._executor.call_for_turn(
            lambda ticket, turn: Reinstate(ticket, session.id, breakpoints, session.interventions, paused, turn),
            self._turns.observer(session),
        )
        self._take_up(session, turn, place)

    def _take_up(self, session: Session, turn: Turn, place: PausedPlace) -> None:
        """Make a new session be paused in that place, as the engine has it. It has its history already."""
        turn.readers = 0
        session.take_up(turn, place)
        reader = self.reader(session, turn, place.rule)
        reader.replay(session.history[place.prompt_tokens :], place.logprobs)
        self._wait(session, place.info)

    def _wait(self, session: Session, info: CheckpointInfo) -> None:
        if session.state is not SessionState.PAUSED:  # a cancel is on its way
            return
        assert session.turn is not None
        if self._turns.draining:  # nobody could resume it
            self._turns.cancel(session, session.turn)
            return
        timeout_s = session.pause_limit.timeout_s
        timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out, session)
        session.pause = Pause(info, time.time() + timeout_s, timer)

    def _time_out(self, session: Session) -> None:
        assert session.turn is not None
        if self._executor.failure is not None:
            return
        if session.pause_limit.on_timeout is OnTimeout.ABORT:
            self._turns.cancel(session, session.turn)
            return
        task = asyncio.create_task(self._read_on(session, self.resume(session, NEXT_BREAKPOINT)))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _read_on(self, session: Session, reader: TurnReader) -> None:
        """Read to the next pause or the end: its stop strings still count."""
        try:
            await reader.read()
        except DjinnError as error:
            logger.warning("session %s, which went on by itself after a pause: %s", session.id, error.message)
        finally:
            self._turns.release(session, reader.turn)


def require_pause(session: Session, *, to: str) -> Pause:
    """The session's pause. Raises `WrongState` if it is not paused; `to` says what was asked for."""
    session.require(SessionState.PAUSED, to=to)
    assert session.pause is not None
    return session.pause


def _check_lens(info: CheckpointInfo, positions: Positions) -> None:
    """Raise `FieldOutOfRange` if `positions` are too many of the checkpoint's."""
    end = info.end if positions.end is None else min(info.end, positions.end)
    count = 1 if positions.last else end - max(info.first, positions.first)
    if count > MAX_LENS_POSITIONS:
        raise FieldOutOfRange(
            f"positions: the lens takes 1 to {MAX_LENS_POSITIONS} of the checkpoint's {info.first}:{info.end} at once, "
            f"not {count}",
            param="positions",
        )
