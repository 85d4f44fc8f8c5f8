"""Driving an engine without a thread: commands go in by hand, steps run until every turn has ended."""

import itertools
import socket
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from app.domain.memory_map import MemoryMap, SessionMemory
from app.domain.values import KVBudget, Phase, SamplingParams, SessionId, StopRule, Ticket
from app.gpu.device.streams import Event as DeviceEvent
from app.gpu.engine import Engine
from app.gpu.kv.mover import KVMover
from app.gpu.planning.scheduler import Scheduler
from app.gpu.state.moves import Move, Moved
from app.gpu.state.sequence import TokenSequence
from app.messages import (
    Close,
    Command,
    Done,
    Event,
    Failed,
    Fork,
    Inspect,
    Lacking,
    Open,
    Placed,
    SetPhase,
    Spent,
    Submit,
    Token,
    TurnFinished,
)
from app.settings import EngineSettings

GREEDY = SamplingParams(seed=0, temperature=0)
BLOCK = 4


def cpu_settings(**changed: Any) -> EngineSettings:
    """Of an engine on a CPU with blocks of `BLOCK` tokens."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "tensor_parallel": 1,
        "dtype": "float32",
        "matmul_precision": "auto",
        "batch_invariant": False,
        "cuda_graphs": None,
        "weights_device": None,
        "weights_dir": Path(),
        "chunk_bytes": 1 << 20,
        "kv_dtype": "auto",
        "kv_disk": KVBudget(bytes=1 << 24),
        "kv_dir": None,
        "block_size": BLOCK,
        "max_running": 8,
        "max_draft_tokens": None,
        "max_activation_bytes": 1 << 30,
        "max_model_len": None,
        "lora": (),
        "lora_bytes": 1 << 26,
        "upload_bytes": 1 << 26,
    }
    return EngineSettings(**settings | changed)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        return out, server.accept()[0]


class SteppedMover:
    """Carries out moves when it is told to, on the caller's thread."""

    def __init__(self, mover: KVMover) -> None:
        self.threaded = mover
        """What the engine has had before."""
        self.identity = mover._identity
        self.follow = mover.follow
        self.pending: list[tuple[Move, DeviceEvent]] = []

    def submit(self, moves: Iterable[Move]) -> None:
        self.pending += [(move, self.threaded._host.now()) for move in moves]

    def carry_out(self) -> list[Moved]:
        """Do all that has been ordered."""
        orders, self.pending = self.pending, []
        return [self.threaded.carry_out(*order) for order in orders]


class Driver:
    """A single-threaded client of an engine; raises the error of any command that fails."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scheduler, self.handler, self.runner = engine._scheduler, engine._handler, engine._runner
        self.placement = self.scheduler.placement
        self.mover = SteppedMover(engine._mover)
        engine._mover = cast("KVMover", self.mover)
        self.events: dict[Ticket, list[Event]] = {}
        self.places: dict[SessionId, SessionMemory] = {}
        self._tickets = map(Ticket, itertools.count(1))
        self._names = itertools.count()

    def ticket(self) -> Ticket:
        return next(self._tickets)

    def do(self, command: Command) -> object:
        """Carry out a command that is not a `Submit`; returns the value of its `Done`."""
        self.take(self.engine.handle(command))
        if not self.events.get(command.ticket):
            self.move()
        while self.handler.is_looking:
            self.take(self.handler.go_on(is_busy=False))
        done = self.events[command.ticket][-1]
        assert isinstance(done, Done)
        return done.value

    def open(self, tenant: str = "", name: str | None = None) -> SessionId:
        session = SessionId(name or f"session-{next(self._names)}")
        self.do(Open(self.ticket(), session, tenant))
        return session

    def close(self, session: SessionId) -> None:
        self.do(Close(self.ticket(), session))

    def sequence(self, session: SessionId) -> TokenSequence:
        """What the engine has of the session."""
        return next(each for each in self.handler.sequences if each.session == session)

    def place(self, session: SessionId) -> SessionMemory:
        """Where its KV is, as its client is told."""
        self.take(self.handler.placed())
        return self.places[session]

    def submit(
        self,
        session: SessionId,
        token_ids: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        replace: bool = False,
    ) -> Ticket:
        ticket = self.ticket()
        self.take(
            self.engine.handle(
                Submit(ticket, session, tuple(token_ids), sampling, StopRule(max_tokens), replace=replace)
            )
        )
        return ticket

    def answer(self, session: SessionId, token_ids: Sequence[int], *asked: Any, **more: Any) -> Ticket:
        """Submit a turn, as `submit` takes it, and step until it has ended."""
        turn = self.submit(session, token_ids, *asked, **more)
        self.finish(turn)
        return turn

    def finish(self, *turns: Ticket) -> None:
        """Step until these turns have ended."""
        while not all(self.ended(turn) for turn in turns):
            self.advance()

    def advance(self) -> None:
        """One step, and all moves that it leads to."""
        self.take(self.engine.step())
        self.move()

    def steps_until_token(self, turn: Ticket) -> int:
        """Step until the turn has a token; returns how many steps that were."""
        steps = 0
        while not self.tokens(turn):
            self.advance()
            steps += 1
        return steps

    def check(self) -> None:
        check_blocks(self.scheduler, self.handler.sequences)

    def move(self) -> None:
        """Carry out what has been ordered, and what that leads to, until nothing moves any more."""
        while True:
            self.mover.submit(self.placement.take_orders())
            if not self.mover.pending:
                break
            for report in self.mover.carry_out():
                self.take([*self.engine.handle(report), *self.handler.go_on(is_busy=False)])

    def ended(self, turn: Ticket) -> bool:
        return any(isinstance(event, TurnFinished) for event in self.events.get(turn, []))

    def tokens(self, turn: Ticket) -> list[int]:
        return [event.token_id for event in self.events.get(turn, []) if isinstance(event, Token)]

    def end(self, turn: Ticket) -> TurnFinished:
        last = self.events[turn][-1]
        assert isinstance(last, TurnFinished)
        return last

    def generate(self, token_ids: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY) -> list[int]:
        """Generate in a session of its own."""
        session = self.open()
        turn = self.answer(session, token_ids, max_tokens, sampling)
        self.close(session)
        return self.tokens(turn)

    def signal(self, session: SessionId, phase: Phase, resume_in_ms: float | None = None) -> None:
        """Say the phase, and let everything move that moves."""
        self.do(SetPhase(self.ticket(), session, phase, resume_in_ms))
        self.move()

    def fork_idle(self, session: SessionId) -> SessionId:
        child = SessionId(f"child-{next(self._names)}")
        self.do(Fork(self.ticket(), session, child))
        return child

    def memory(self) -> MemoryMap:
        found = self.do(Inspect(self.ticket()))
        assert isinstance(found, MemoryMap)
        return found

    def take(self, events: Sequence[Event]) -> None:
        """Take what is said to every turn; then raise the first error, if there is one."""
        failures = [event for event in events if isinstance(event, Failed)]
        for event in events:
            if isinstance(event, Failed):
                continue
            if isinstance(event, Placed):
                self.places[event.session] = event.memory
                continue
            if isinstance(event, Lacking | Spent):
                continue
            self.events.setdefault(event.ticket, []).append(event)
        if failures:
            raise failures[0].error


def check_blocks(scheduler: Scheduler, sequences: Collection[TokenSequence]) -> None:
    """Fail if a block of a tier is not accounted for, a sequence is in two lists, one at rest is busy, or a busy one
    has nothing to do.
    """
    cache, tiers = scheduler.cache, scheduler.placement.tiers
    cache.pool.check_integrity([*(each.held for each in sequences), *tiers.held(cache.pool)])
    cache.host.check_integrity([*(each.copies for each in sequences), *tiers.held(cache.host)])
    queue, resident, away = scheduler.queue, scheduler.placement.resident, scheduler.placement.away
    groups = [set(group) for group in (queue.waiting, queue.running, resident, away)]
    assert len(set().union(*groups)) == sum(map(len, groups)), "a session is in two lists"
    assert not any(each.busy for each in (*resident.values(), *away.values())), "a session that is placed has a turn"
    active = [*queue.waiting.values(), *queue.running.values()]
    assert all(each.busy and each.pending for each in active), "a session in the queue has nothing to compute"
    fast = [each for each in queue.running.values() if each.computed < each.fast_path_until]
    assert all(map(scheduler._is_on_fast_path, fast)), "a session is said to be on the fast path and is not"
