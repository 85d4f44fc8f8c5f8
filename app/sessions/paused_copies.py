"""Copies of paused sessions are paused in the same place: forks here, and files that another server opens."""

from contextlib import AsyncExitStack

from app.bridge.executor import EngineExecutor
from app.bridge.turn import Turn
from app.domain.activations import PausedTurn
from app.messages import Fork, ReadPaused, Reinstate
from app.sessions.charges.charges import MOST_RESERVED, Charges, TurnNeed, reported
from app.sessions.charges.turn_charge import TurnCharge
from app.sessions.paused_turn import PausedPlace
from app.sessions.pauses import Pauses
from app.sessions.session import Session
from app.sessions.turns import Turns
from app.traces.base import TurnTrace


class PausedCopies:
    """Takes paused turns from session to session. Used on the event loop only."""

    def __init__(self, executor: EngineExecutor, turns: Turns, pauses: Pauses, charges: Charges) -> None:
        self._executor = executor
        self._turns = turns
        self._pauses = pauses
        self._charges = charges

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
            max_tokens=session.max_tokens,
            logprobs=tuple(reader.all_logprobs),
        )

    def reserve(self, copy: Session, place: PausedPlace, cleanup: AsyncExitStack, *, sent: int) -> TurnCharge:
        """Count a copy that is paused there, and what is left of its turn, until it has been made or `cleanup` unwinds.
        `sent`: tokens of its context that it may have to compute.

        Raises what `Charges.reserve` does.
        """
        generated = len(copy.history) - place.prompt_tokens
        logprobs = reported(place.rule.logprobs, min(place.max_tokens, MOST_RESERVED))
        need = TurnNeed(len(copy.history), sent, max(0, place.max_tokens - generated), logprobs)
        (charge,) = self._charges.reserve(copy.owner, [need], cleanup, generated=generated)
        return charge

    async def fork(self, session: Session, child: Session, place: PausedPlace, charge: TurnCharge) -> None:
        """Make `child` a session that is paused there, where `session` is. `charge` is what `reserve` has counted."""
        turn = await self._executor.call_for_turn(
            lambda ticket, turn: Fork(ticket, session.id, child.id, turn),
            self._turns.observer(child, charge),
        )
        self._take_up(child, turn, place, charge, copy_of=session.trace)

    async def export(self, session: Session) -> PausedTurn | None:
        """The session's turn as it can go on elsewhere; None if it is not paused."""
        if session.pause is None:
            return None
        found: PausedTurn = await self._executor.call(lambda ticket: ReadPaused(ticket, session.id))
        return found

    async def reinstate(self, session: Session, paused: PausedTurn, place: PausedPlace, charge: TurnCharge) -> None:
        """Give a session that is being imported its breakpoints, its interventions, and a turn that is paused. `charge`
        is what `reserve` has counted.

        Raises `FieldOutOfRange` for a grammar that is invalid, or that the turn does not match.
        """
        breakpoints, grammar = tuple(session.breakpoints.values()), paused.sampling.grammar
        held = None if grammar is None else await self._turns.compiled(grammar)
        turn = await self._executor.call_for_turn(
            lambda ticket, turn: Reinstate(ticket, session.id, breakpoints, session.interventions, paused, turn),
            self._turns.observer(session, charge),
        )
        del held  # the engine has its own now
        self._take_up(session, turn, place, charge)

    def _take_up(
        self,
        session: Session,
        turn: Turn,
        place: PausedPlace,
        charge: TurnCharge,
        *,
        copy_of: TurnTrace | None = None,
    ) -> None:
        """Make a new session be paused in that place, as the engine has it. It has its history already."""
        self._charges.begin(session.owner, charge)
        turn.readers = 0
        session.take_up(turn, place)
        self._turns.trace(session, copy_of=copy_of)
        reader = self._turns.reader(session, turn, place.rule)
        reader.replay(session.history[place.prompt_tokens :], place.logprobs)
        self._pauses.wait(session, place.info)
