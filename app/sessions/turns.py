"""Turns of sessions: queued, followed and read. Copies of paused sessions are paused in the same place."""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from app.domain.activations import PausedTurn
from app.domain.errors import Busy, ContextTooLong, Draining, EngineAway, EngineStalled, FieldOutOfRange, WrongState
from app.domain.values import FinishReason, Grammar, SamplingParams, SessionState, StopRule
from app.engine_process.executor import EngineExecutor
from app.engine_process.turn import Turn
from app.journal.records import DoneTurn
from app.messages import Above, Failed, Fork, Paused, Reinstate, Submit, TurnEvent, TurnFinished
from app.sessions.adapters import Adapters
from app.sessions.charges import MOST_RESERVED, Charges, DeadlyTurns, TurnCharge, TurnNeed, reported
from app.sessions.keeper import SessionKeeper
from app.sessions.keyed import KeyedRequest, repeated_turn
from app.sessions.pauses import Pauses
from app.sessions.session import PausedPlace, Session
from app.sessions.side_work import Lane, SideWork
from app.sessions.table import SessionTable
from app.sessions.tool_waits import ToolWaits
from app.telemetry.metrics import Metrics
from app.telemetry.turn_metrics import TurnClock, TurnStart
from app.text.generation import TextRule, TurnReader
from app.text.tokenizer import Tokens

if TYPE_CHECKING:
    from app.telemetry.spans import SpanTraces, TurnSpan

RETRY_AFTER_S = 1
KNOWN_GRAMMARS = 64
"""That have been compiled lately: the engine probably still has them."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn as it is asked for: what it starts from, how it goes on, and how its text is read."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    stop: StopRule
    text: TextRule
    replace: bool = False
    """Whether `token_ids` become the history; otherwise they are appended to it."""
    pausable: bool = True
    """Whether breakpoints may pause it: not where the client could not resume it."""
    param: str = "prompt"
    """Names the field that the tokens came from."""
    keyed: KeyedRequest | None = None
    """The request with an `Idempotency-Key` that asks for it."""
    prefix_ends: tuple[int, ...] = ()
    """Lengths of prefixes of a whole prompt that other sessions may share."""
    above: Above | None = None
    """Where the pass begins, if not with new tokens in the first layer."""


@dataclass(eq=False)
class Turns:
    """The turns of all open sessions. At most `max_turns` of each owner run or wait at once, but for turns
    that were paused. Used on the event loop only.
    """

    _executor: EngineExecutor
    _table: SessionTable
    _keeper: SessionKeeper
    _tokens: Tokens
    _metrics: Metrics
    _pauses: Pauses
    _charges: Charges
    _side_work: SideWork
    _tool_waits: ToolWaits
    _adapters: Adapters
    _max_turns: int
    _traces: SpanTraces | None
    _known_grammars: OrderedDict[Grammar, None] = field(default_factory=OrderedDict)
    deadly: DeadlyTurns = field(default_factory=DeadlyTurns)
    apart_tokens: Callable[[], int] = lambda: 0
    """How many tokens without KV make a prompt that another server may compute; 0: none does."""

    async def compile_grammar(
        self, owner: str | None, sampling: SamplingParams, min_tokens: int, cleanup: AsyncExitStack
    ) -> None:
        """Compile the grammar of a turn, if it has one, before the turn is started. The engine thread then finds it,
        until `cleanup` unwinds. One that is compiled already does not wait for others of the owner.

        Raises `FieldOutOfRange` for an invalid grammar, and for `min_tokens` beside one.
        """
        grammar = sampling.grammar
        if grammar is None:
            return
        if min_tokens:
            raise FieldOutOfRange(f"min_tokens must be 0 with {grammar.field}", param="min_tokens")
        is_known = grammar in self._known_grammars
        async with nullcontext() if is_known else self._side_work.turn(owner, Lane.GRAMMAR):
            cleanup.enter_context(nullcontext(await self.compiled(grammar)))
        self._known_grammars[grammar] = None
        self._known_grammars.move_to_end(grammar)
        if len(self._known_grammars) > KNOWN_GRAMMARS:
            self._known_grammars.popitem(last=False)

    async def compiled(self, grammar: Grammar) -> object:
        """The grammar, which the engine thread finds for as long as the result is held. Raises `FieldOutOfRange`."""
        self._executor.check()
        compiling: Future[Any] = self._executor.engine.grammars.compile(grammar)
        return await asyncio.wrap_future(compiling)

    def start(
        self, session: Session, request: TurnRequest, cleanup: AsyncExitStack, charge: TurnCharge | None = None
    ) -> TurnReader:
        """Queue a turn; returns its reader. When `cleanup` unwinds, a turn that still runs is cancelled. `charge` is
        what `reserve` has counted for it already.

        Raises `WrongState` unless idle, and if it is not `pausable` but a breakpoint pauses, `Busy` when the queue is
        full, what `Charges.reserve` raises, `Draining`, `Moving`, `FieldOutOfRange` if there is no token to start from,
        `DeadlyTurn`, and `AdapterMissing`.
        """
        session.require(SessionState.IDLE, to="start a turn")
        self._adapters.require(session.adapter)
        self._table.require_no_drain(session)
        if not request.pausable and session.pausing:
            raise WrongState(
                f"session {session.id} would pause at breakpoint {session.pausing[0]}, and this API has no pauses: use "
                f"/v1/sessions/{session.id}/generate, or remove the breakpoint"
            )
        # Not by those that wait: turns that come together all wait, until the engine has looked at the first.
        if self._table.turns_of(session.owner) >= self._max_turns:
            raise Busy(f"the queue is full ({self._max_turns} turns run or wait)", retry_after_s=RETRY_AFTER_S)
        new = array("I", request.token_ids)
        history = new if request.replace else session.history + new
        if not history:
            raise FieldOutOfRange("a turn needs at least 1 token to start from", param=request.param)
        self.deadly.check(session.owner, history, param=request.param)
        if charge is None:
            sent = len(request.token_ids) + (0 if request.replace else session.uncounted)
            sent += 0 if request.above is None else len(history) - request.above.first
            need = _need(request, len(history), sent)
            (charge,) = self._charges.reserve(session.owner, [need], cleanup)
        submit = partial(
            Submit,
            session=session.id,
            token_ids=tuple(request.token_ids),
            sampling=request.sampling,
            stop=request.stop,
            replace=request.replace,
            pausable=request.pausable,
            prefix_ends=request.prefix_ends,
            apart_tokens=self.apart_tokens() if request.above is None else 0,
            above=request.above,
        )
        turn = self._executor.start_turn(submit, self.observer(session, charge))
        self._charges.begin(session.owner, charge)  # from here on the turn has an end
        if session.usage.interrupted is not None:  # a second restart would tell of it again
            session.usage.interrupted = None
            self._keeper.note(session)
        session.begin(turn, history, request.stop.max_tokens)
        session.keyed = request.keyed
        if request.keyed is not None:
            request.keyed.session, request.keyed.outlives_client = session.id, not request.replace
        session.watcher.begun(session)
        cleanup.callback(self._pauses.release, session, turn)
        self.trace(session, request)
        self._tool_waits.end(session)
        return self.reader(session, turn, request.text)

    def free(self, owner: str | None) -> int:
        """How many turns the owner may start now beside those that it has."""
        limit = self._charges.turns_at_once(owner)
        most = self._max_turns if limit is None else min(limit, self._max_turns)
        return max(0, most - self._table.turns_of(owner))

    def reserve(self, owner: str | None, requests: Sequence[TurnRequest], cleanup: AsyncExitStack) -> list[TurnCharge]:
        """Count turns that a call will start in new sessions, all or none. Raises what `Charges` does."""
        needs = [_need(request, len(request.token_ids), len(request.token_ids)) for request in requests]
        return self._charges.reserve(owner, needs, cleanup)

    def reader(self, session: Session, turn: Turn, rule: TextRule) -> TurnReader:
        """Read the session's turn from now on."""
        on_stop = partial(self._pauses.cancel, session, turn, reason=FinishReason.STOP)
        settled = partial(self._keeper.settled, session)
        session.reader = TurnReader(turn, self._tokens, rule, on_stop, settled)
        return session.reader

    def repeat(self, session: Session, done: DoneTurn, rule: TextRule) -> TurnReader:
        """Read again a turn of the session that is over. Its log-probabilities are not kept."""
        settled = partial(self._keeper.settled, session)
        return TurnReader(repeated_turn(done), self._tokens, replace(rule, logprobs=None), lambda kept: None, settled)

    def trace(self, session: Session, request: TurnRequest | None = None, copy_of: TurnSpan | None = None) -> None:
        """Begin the trace of the turn that has come into the session, if turns are traced. Without a `request` it is
        paused, as the turn of `copy_of` is.
        """
        if self._traces is None:
            return
        model = self._executor.engine.info.name if session.adapter is None else session.adapter.name
        param, sampling = ("", None) if request is None else (request.param, request.sampling)
        start = TurnStart(session.id, session.owner, model, session.kv, session.max_tokens, param, sampling, copy_of)
        session.trace = self._traces.begin(start)

    def observer(self, session: Session, charge: TurnCharge) -> Callable[[TurnEvent], None]:
        """What is to be told of a turn of the session before its reader is."""
        clock = TurnClock(self._metrics.turns, is_resumed=len(session.history) > 0)

        def observe(event: TurnEvent) -> None:
            clock.observe(event)
            charge.observe(event)
            if session.trace is not None:
                session.trace.observe(event)
            usage = session.usage
            usage.queue_ms, usage.restore_ms, usage.prefill_ms = clock.queue_ms, clock.restore_ms, clock.prefill_ms
            self._judge(session, event)
            session.observe(event)
            if isinstance(event, TurnFinished):
                session.uncounted = charge.uncounted
                self._keep_turn(session, event)
            elif isinstance(event, Paused):
                self._pauses.begin(session, event.checkpoint)
            elif isinstance(event, Failed):
                self._keeper.room.release(session.id)
                if session.usage.paused is not None and not isinstance(event.error, Draining):
                    # The server goes on: its next restart has not ended this one.
                    session.usage.paused = None
                    self._keeper.note(session)
            if isinstance(event, TurnFinished | Paused | Failed):
                session.watcher.stopped(session, event)
            if isinstance(event, TurnFinished | Failed):
                session.trace = session.keyed = None

        return observe

    def _keep_turn(self, session: Session, event: TurnFinished) -> None:
        """Journal a turn that is over, and with it that its request has been done.

        A response that was cancelled can be asked for again: the next one goes on from the response before it.
        """
        keyed = session.keyed
        if session.state is SessionState.CLOSED:
            keyed = None
        if keyed is not None and keyed.response is not None and event.reason is FinishReason.CANCELLED:
            keyed = None
        done = []
        if keyed is not None:
            keyed.finish(session.id, session.history[session.prompt_tokens :], event)
            self._keeper.keyed.finished(keyed)
            done.append(keyed.record(session.id))
        self._keeper.note(session, keyed=done)

    def _judge(self, session: Session, event: TurnEvent) -> None:
        """Remember whether the engine dies while the turn in the session waits or runs."""
        if isinstance(event, Failed) and isinstance(event.error, EngineAway) and session.under_way:
            context = session.history[: session.prompt_tokens]
            if isinstance(event.error, EngineStalled):
                self.deadly.suspect(session.owner, context)
            else:
                self.deadly.note_death(session.owner, context, self._executor.losses)
        elif isinstance(event, TurnFinished):
            self.deadly.note_end(session.owner, session.history[: session.prompt_tokens])

    def room(
        self, context: int, max_tokens: int | None, *, param: str = "prompt", limit_param: str = "max_tokens"
    ) -> int:
        """How many tokens a turn on `context` tokens may generate: `max_tokens`, or what there is room for.

        Raises `ContextTooLong` if the context and `max_tokens` exceed the model's length; `param` names what the
        context came from, `limit_param` what `max_tokens` came from.
        """
        length = self._executor.engine.info.max_model_len
        room = length - context
        wanted = 1 if max_tokens is None else max_tokens
        if room < wanted:
            too_large = limit_param if room >= 0 and max_tokens else param
            limit = f"must be at most {room}" if too_large == limit_param else "is too long"
            raise ContextTooLong(
                f"{too_large} {limit}: this model's context is {length} tokens, and the turn begins with {context} and "
                f"needs room for {wanted} more",
                param=too_large,
                prompt=context,
                wanted=wanted,
                context=length,
            )
        return room if max_tokens is None else max_tokens

    async def fork_paused(
        self, session: Session, child: Session, place: PausedPlace, opening: AbstractAsyncContextManager[None]
    ) -> None:
        """Make `child` a session that is paused there, where `session` is, and have it opened by `opening`. Raises what
        `Charges.reserve` does, before anything is opened.
        """
        async with AsyncExitStack() as cleanup:
            charge = self._reserve(child, place, cleanup, sent=place.left_of_prompt)
            async with opening:
                turn = await self._executor.call_for_turn(
                    lambda ticket, turn: Fork(ticket, session.id, child.id, turn), self.observer(child, charge)
                )
                self._take_up(child, turn, place, charge, copy_of=session.trace)

    async def furnish(
        self, session: Session, paused: PausedTurn | None, place: PausedPlace | None, *, sent: int = 0
    ) -> None:
        """Have the engine give a session that comes from elsewhere its breakpoints, its interventions, and its turn if
        that is paused. `sent`: tokens of the turn's context that it may have to compute.

        Raises what `Charges.reserve` does, and `FieldOutOfRange` for a grammar that is invalid, or that the turn does
        not match.
        """
        give = partial(
            Reinstate,
            session=session.id,
            breakpoints=tuple(session.breakpoints.values()),
            interventions=session.interventions,
        )
        if paused is None or place is None:
            if session.breakpoints or session.interventions:
                await self._executor.call(give)
            return
        async with AsyncExitStack() as cleanup:
            charge = self._reserve(session, place, cleanup, sent=sent)
            grammar = paused.sampling.grammar
            held = None if grammar is None else await self.compiled(grammar)
            turn = await self._executor.call_for_turn(
                lambda ticket, turn: give(ticket, paused=paused, turn=turn), self.observer(session, charge)
            )
            del held  # the engine has its own now
            self._take_up(session, turn, place, charge)

    def _reserve(self, copy: Session, place: PausedPlace, cleanup: AsyncExitStack, *, sent: int) -> TurnCharge:
        """Count a copy that is paused there, and what is left of its turn, until it has been made or `cleanup` unwinds.
        `sent`: tokens of its context that it may have to compute.
        """
        generated = len(copy.history) - place.prompt_tokens
        logprobs = reported(place.rule.logprobs, min(place.max_tokens, MOST_RESERVED))
        need = TurnNeed(len(copy.history), sent, max(0, place.max_tokens - generated), logprobs)
        (charge,) = self._charges.reserve(copy.owner, [need], cleanup, generated=generated)
        return charge

    def _take_up(
        self, session: Session, turn: Turn, place: PausedPlace, charge: TurnCharge, *, copy_of: TurnSpan | None = None
    ) -> None:
        """Make a new session be paused in that place, as the engine has it. It has its history already."""
        self._charges.begin(session.owner, charge)
        turn.readers = 0
        session.take_up(turn, place)
        self.trace(session, copy_of=copy_of)
        reader = self.reader(session, turn, place.rule)
        reader.replay(session.history[place.prompt_tokens :], place.logprobs)
        self._pauses.wait(session, place.info)


def _need(request: TurnRequest, context: int, sent: int) -> TurnNeed:
    most, sampling = request.stop.max_tokens, request.sampling
    of_prompt = reported(sampling.prompt_logprobs, context)
    return TurnNeed(context, sent, most, of_prompt + reported(sampling.logprobs, min(most, MOST_RESERVED)))
