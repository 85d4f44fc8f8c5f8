"""An engine in this process that is stepped by hand, so that nothing but the engine is on the clock."""

import itertools
import time
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import Breakpoint, Until
from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.attention import attention_for
from app.gpu.attention.batch import Batch
from app.gpu.device.choice import streams_of
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.startup.loader import build_engine
from app.gpu.startup.weights import LoadedModel
from app.messages import Close, Command, Event, Failed, Open, Paused, Placed, Resume, Spent, Submit, Token, TurnFinished
from app.model_store.resolve import resolve
from app.settings import Settings
from benchmarks.breakpoints.plan import DTYPE, KV_DEVICE
from loadgen.processes.process import ServerFailedError

GREEDY = SamplingParams(seed=0, temperature=0)


class TimedStack:
    """A model that notes when the first layer of a step begins."""

    def __init__(self, stack: LayerStack) -> None:
        self._stack = stack
        self.first_layer_at: float | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._stack, name)

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        if self.first_layer_at is None:
            self.first_layer_at = time.perf_counter()
        return self._stack.layer(index, hidden, batch, kv)


class BenchEngine:
    """The engine, and what it has last said of each session's turn."""

    def __init__(self, model: str, **changed: object) -> None:
        values = {"model": model, "device": "cpu", "dtype": DTYPE, "kv_device": KV_DEVICE, "kv_policy": "none"}
        settings = Settings.model_validate({**values, "state_dir": None, **changed})
        resolved, cpu = resolve(settings.model, cache_dir=settings.cache_dir.expanduser()), torch.device("cpu")
        stack = load_stack(
            resolved, device=cpu, dtype=getattr(torch, DTYPE), attention=attention_for(cpu), max_model_len=None
        )
        self._stack = TimedStack(stack)
        loaded = LoadedModel(cast("LayerStack", self._stack), streams_of(cpu))
        self._engine = build_engine(resolved, loaded, settings.engine())
        self.num_layers = stack.num_layers
        self._tickets = map(Ticket, itertools.count(1))
        self._names = map("session-{}".format, itertools.count())
        self._turns: dict[Ticket, SessionId] = {}
        self._last: dict[SessionId, Token | Paused | TurnFinished] = {}
        self.tokens = 0
        """Generated so far, by all sessions."""

    def open(self, breakpoints: Sequence[Breakpoint] = ()) -> SessionId:
        session = SessionId(next(self._names))
        self._handle(Open(next(self._tickets), session, breakpoints=tuple(breakpoints)))
        return session

    def submit(self, session: SessionId, token_ids: Sequence[int], max_tokens: int) -> None:
        ticket = self._ticket(session)
        self._handle(Submit(ticket, session, tuple(token_ids), GREEDY, StopRule(max_tokens)))

    def resume(self, session: SessionId, until: Until) -> float:
        """Go on with a paused turn; returns the seconds that the engine took to take the command."""
        return self._handle(Resume(self._ticket(session), session, until))

    def close(self, session: SessionId) -> None:
        self._handle(Close(next(self._tickets), session))
        self._last.pop(session, None)

    def step(self) -> float:
        """Run a step; returns the seconds from its beginning to that of the first layer that it computes."""
        self._stack.first_layer_at = None
        begin = time.perf_counter()
        self._take(self._engine.step())
        computed_from = self._stack.first_layer_at
        return 0.0 if computed_from is None else computed_from - begin

    def checkpoint(self, session: SessionId) -> CheckpointInfo | None:
        """Where the session is paused, if it is."""
        last = self._last.get(session)
        return last.checkpoint if isinstance(last, Paused) else None

    def pause(self, session: SessionId) -> CheckpointInfo:
        """Step until the session is paused. Raises ServerFailedError if its turn ends first."""
        while (checkpoint := self.checkpoint(session)) is None:
            if isinstance(self._last.get(session), TurnFinished):
                raise ServerFailedError("a turn ended that was to pause")
            self.step()
        return checkpoint

    def has_begun(self, session: SessionId) -> bool:
        """Whether the session's turn has generated a token."""
        return session in self._last

    def _ticket(self, session: SessionId) -> Ticket:
        ticket = next(self._tickets)
        self._turns[ticket] = session
        self._last.pop(session, None)
        return ticket

    def _handle(self, command: Command) -> float:
        begin = time.perf_counter()
        events = self._engine.handle(command)
        seconds = time.perf_counter() - begin
        self._take(events)
        return seconds

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Failed):
                raise ServerFailedError(event.error.message) from event.error
            if isinstance(event, Placed | Spent):
                continue
            if isinstance(event, Token | Paused | TurnFinished):
                self.tokens += isinstance(event, Token)
                self._last[self._turns[event.ticket]] = event
