"""The bridge between the event loop and the engine thread: commands go over with a ticket, events come back by it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from app.domain.errors import DjinnError, EngineAway, EngineError, EngineRestarting, EngineStalled
from app.domain.values import Grammar, ModelInfo, Ticket
from app.engine_process.frames import Compile, Prepare, Release
from app.engine_process.turn import Turn
from app.messages import (
    Back,
    Command,
    Done,
    Event,
    Failed,
    GoesOn,
    Lost,
    Notice,
    Replacement,
    Resume,
    Stalled,
    Submit,
    TurnEvent,
    TurnFinished,
)

if TYPE_CHECKING:
    from app.grammars.compiler import Grammars

logger = logging.getLogger(__name__)

Deliver = Callable[[Sequence[Event | Replacement]], None]


class HeldGrammar:
    """The engine finds the grammar as long as this is held."""

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release

    def __del__(self) -> None:
        self._release()


class RemoteGrammars:
    """Has grammars compiled. Any thread may call it."""

    def __init__(self, send: Callable[[Compile | Release | Prepare], bool]) -> None:
        """`send` says whether there is an engine that takes frames."""
        self._send = send
        self._numbers = itertools.count()
        self._compiling: dict[int, Future[HeldGrammar]] = {}

    def prepare(self) -> None:
        """Have the vocabulary read: better beside no turn."""
        self._send(Prepare())

    def compile(self, grammar: Grammar) -> Future[HeldGrammar]:
        """Have it compiled, unless it is already. The future raises what the engine's compiler raises, and
        `EngineAway`.
        """
        number = next(self._numbers)
        future: Future[HeldGrammar] = Future()
        self._compiling[number] = future
        future.add_done_callback(lambda done: self._release(number) if done.cancelled() else None)
        if not self._send(Compile(number, grammar)):
            self.fail_all(EngineRestarting("it is being started again"))
        return future

    def settle(self, number: int, error: DjinnError | None) -> None:
        """Take the engine's answer."""
        future = self._compiling.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(HeldGrammar(lambda: self._send(Release(number))))
        else:
            self._send(Release(number))
            future.set_exception(error)

    def fail_all(self, error: EngineAway) -> None:
        """The engine has died or stalled: nothing is waited for any more. One that goes on need not compile."""
        for number in list(self._compiling):
            future = self._compiling.pop(number, None)
            self._send(Release(number))
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _release(self, number: int) -> None:
        """Cancel the wait for a grammar that is being compiled."""
        if self._compiling.pop(number, None) is not None:
            self._send(Release(number))


class Engine(Protocol):
    """The engine as the executor uses it. `send` and `stop` may be called from any thread."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def grammars(self) -> RemoteGrammars | Grammars:
        """What compiles grammars. The engine finds one for as long as the result is held."""
        ...

    def send(self, command: Command) -> None:
        """Queue a command; its answer comes through `deliver`."""
        ...

    def give(self, connection: socket.socket) -> int:
        """Take over a connection to another server; returns the number that commands know it by. Raises `OSError`."""
        ...

    def run(self, deliver: Deliver) -> None:
        """Work until `stop`, on the calling thread. Calls `deliver` with the events of each step."""
        ...

    def stop(self) -> None:
        """Make `run` return; what is still running ends as `Failed(Draining)`."""
        ...


class EngineExecutor:
    """Runs the engine on a thread and gives the event loop futures and turns for its answers."""

    def __init__(self, engine: Engine, on_notice: Callable[[Notice], None]) -> None:
        """`on_notice` takes what answers no command, on the event loop."""
        self.engine = engine
        self._on_notice = on_notice
        self._tickets = itertools.count(1)
        self._replies: dict[Ticket, asyncio.Future[object]] = {}
        self._turns: dict[Ticket, tuple[Turn, Callable[[TurnEvent], None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.failure: str | None = None
        """Why the engine takes no commands; None: it takes them."""
        self._is_restarting = False
        """Whether another engine is on its way."""
        self._is_back = False
        """Whether it is there already, and sessions are opened in it."""
        self.stall: str | None = None
        """Why the engine, which lives, takes nothing that needs an answer; None: it makes progress."""
        self.losses = 0
        """How often the engine has died."""
        self.reopen: Callable[[], Awaitable[None]] | None = None
        """Called when another engine has taken a dead one's place. Until it is done, only calls that say
        `while_restarting` are taken. If it raises, the engine has failed.
        """
        self._reopening: asyncio.Task[None] | None = None
        self.end_turns: Callable[[EngineStalled], None] = lambda error: None
        """Called when the engine has not got on for so long that its turns must fail, by `fail_turn`."""
        self.go_on: Callable[[], None] = lambda: None
        """Called when it makes progress again."""
        self._impatient: set[Ticket] = set()
        """Of calls that do not wait for an engine that has stalled."""

    def start(self) -> None:
        """Start the engine thread. Call on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="djinn-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Stop the engine and wait for its thread; every waiting call has been answered when this returns."""
        self.engine.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)
        if self._reopening is not None:
            self._reopening.cancel()
        self._give_up("it has stopped")  # for what a request that ends late still asks of it too

    async def call(
        self, make: Callable[[Ticket], Command], *, while_restarting: bool = False, stall_ends_it: bool = False
    ) -> Any:
        """Send the command that `make` builds and wait for its `Done`. Raises the error of a `Failed`, and
        `EngineAway`.

        With `stall_ends_it`, a call that the engine had before it stalled does not wait for it either. The engine may
        still carry the command out: the caller has to take it back.
        """
        self._check_for(while_restarting=while_restarting)
        return await self._send(make, stall_ends_it=stall_ends_it)

    def post(self, make: Callable[[Ticket], Command], *, while_restarting: bool = False) -> None:
        """Send the command that `make` builds without waiting; commands keep their order. A failure is logged.

        An engine that has stalled has it when it goes on.
        """
        if self.stall is None or self.failure is not None:
            self._check_for(while_restarting=while_restarting)
        self._send(make).add_done_callback(_log_failure)

    def start_turn(self, make: Callable[[Ticket], Submit], observe: Callable[[TurnEvent], None]) -> Turn:
        """Send a `Submit`; its events go first to `observe`, which must not raise, then to the returned turn."""
        turn = self._expect_turn(observe)
        self.engine.send(make(turn.ticket))
        return turn

    def resume_turn(self, turn: Turn, make: Callable[[Ticket], Resume]) -> None:
        """Send a `Resume` of a paused turn, which has its ticket from now on."""
        ticket = self._next_ticket()
        self._turns[ticket] = self._turns.pop(turn.ticket)
        turn.ticket = ticket
        self.engine.send(make(ticket))

    def fail_turn(self, turn: Turn, error: DjinnError) -> None:
        """End a turn without the engine. What the engine still says of it is not heard."""
        self._dispatch([Failed(turn.ticket, error)])

    async def call_for_turn(
        self, make: Callable[[Ticket, Ticket], Command], observe: Callable[[TurnEvent], None]
    ) -> Turn:
        """Like `call`, for a command that brings a paused turn, whose ticket `make` gets too; returns the turn."""
        turn = self._expect_turn(observe)
        reply = self._send(lambda ticket: make(ticket, turn.ticket))  # `_expect_turn` has checked

        def let_go(reply: asyncio.Future[object]) -> None:
            if reply.exception() is not None:
                self._turns.pop(turn.ticket, None)  # the engine's death may have ended it

        reply.add_done_callback(let_go)
        await asyncio.shield(reply)  # even if the caller leaves, the turn may come
        if turn.ended.is_set():  # the engine has died since it answered
            await anext(turn)
        return turn

    def _expect_turn(self, observe: Callable[[TurnEvent], None]) -> Turn:
        turn = Turn(self._next_ticket())
        self._turns[turn.ticket] = (turn, observe)
        return turn

    def _check_for(self, *, while_restarting: bool) -> None:
        """What opens sessions waits for an engine that has stalled: it dies, or goes on."""
        if not while_restarting:
            self.check()
        elif self.failure is not None and not self._is_back:
            raise self._error(self.failure)

    def _send(self, make: Callable[[Ticket], Command], *, stall_ends_it: bool = False) -> asyncio.Future[object]:
        ticket = Ticket(next(self._tickets))
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._replies[ticket] = future
        if stall_ends_it:
            self._impatient.add(ticket)
            future.add_done_callback(lambda _: self._impatient.discard(ticket))
        self.engine.send(make(ticket))
        return future

    @property
    def is_lost(self) -> bool:
        """Whether the engine has failed for good: no other is on its way."""
        return self.failure is not None and not self._is_restarting

    @property
    def is_up(self) -> bool:
        """Whether the engine takes turns."""
        return self.failure is None and self.stall is None

    def check(self) -> None:
        """Raise `EngineError` if the engine has died, `EngineRestarting` if another is on its way, and `EngineStalled`
        if it makes no progress.
        """
        if self.failure is not None:
            raise self._error(self.failure)
        if self.stall is not None:
            raise EngineStalled(self.stall, refused=True)

    def _error(self, failure: str) -> DjinnError:
        return EngineRestarting(failure) if self._is_restarting else EngineError(f"the engine has failed: {failure}")

    def _next_ticket(self) -> Ticket:
        self.check()
        return Ticket(next(self._tickets))

    def _run(self) -> None:
        try:
            self.engine.run(lambda events: self._on_loop(lambda: self._dispatch(events)))
        except EngineError as error:
            reason = error.message
            logger.critical("the engine has failed for good: %s", reason)
        except BaseException as error:
            reason = str(error)
            logger.critical("the engine has failed for good", exc_info=True)
        else:
            return
        # Behind the `Lost` that may still be on its way, which would have all wait for another engine.
        self._on_loop(lambda: self._give_up(reason))

    def _on_loop(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the event loop, unless the loop has closed."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _dispatch(self, events: Sequence[Event | Replacement]) -> None:
        for event in events:
            try:
                self._give(event)
            except Exception:  # the events behind it are of others
                logger.exception("an event was not taken: %s", type(event).__name__)

    def _give(self, event: Event | Replacement) -> None:
        if isinstance(event, Notice):
            self._on_notice(event)
        elif isinstance(event, Lost):
            self.stall = None
            self.failure, self._is_restarting, self._is_back = event.reason, True, False
            self.losses += 1
            self._fail_all(EngineRestarting(event.reason))
        elif isinstance(event, Stalled):
            self._note_stall(event)
        elif isinstance(event, GoesOn):
            self.stall = None
            self.go_on()
        elif isinstance(event, Back):
            self._is_back = True
            self._reopening = asyncio.create_task(self._come_back())
        elif event.ticket in self._turns:
            self._give_turn(event)
        else:
            self._give_reply(event)

    def _give_turn(self, event: TurnEvent | Done) -> None:
        turn, observe = self._turns[event.ticket]
        assert not isinstance(event, Done)
        if isinstance(event, TurnFinished | Failed):
            del self._turns[event.ticket]
        try:
            observe(event)
        finally:
            turn.deliver(event)

    def _note_stall(self, stalled: Stalled) -> None:
        self.stall = stalled.reason
        if not stalled.ends_turns:
            return
        error = EngineStalled(stalled.reason, refused=False)
        self.end_turns(error)
        self._dispatch([Failed(ticket, error) for ticket in self._impatient])

    def _give_up(self, reason: str) -> None:
        self.stall = None
        self.failure, self._is_restarting, self._is_back = reason, False, False
        self._fail_all(self._error(reason))

    async def _come_back(self) -> None:
        losses = self.losses
        failure: str | None
        try:
            if self.reopen is not None:
                await self.reopen()
        except EngineRestarting:  # the new one has died too
            return
        except Exception as error:
            logger.exception("sessions could not be opened in another engine")
            failure = f"sessions could not be opened in another one: {error}"
        else:
            failure = None
        if self.losses == losses:
            self.failure, self._is_restarting, self._is_back = failure, False, False

    def _give_reply(self, event: TurnEvent | Done) -> None:
        future = self._replies.pop(event.ticket, None)
        if future is None or future.done():  # it was sent to an engine that died, or the waiter was cancelled
            return
        if isinstance(event, Failed):
            future.set_exception(event.error)
        elif isinstance(event, Done):
            future.set_result(event.value)

    def _fail_all(self, error: DjinnError) -> None:
        waiting = [*self._turns, *self._replies]
        self._dispatch([Failed(ticket, error) for ticket in waiting])


def _log_failure(reply: asyncio.Future[object]) -> None:
    # The next engine opens each session as it is now: it needs no command that the dead one had.
    if not reply.cancelled() and (error := reply.exception()) and not isinstance(error, EngineAway):
        logger.error("a command without a waiter failed: %s", error)
