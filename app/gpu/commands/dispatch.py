"""Commands: each goes to the code that carries it out, and is answered once."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any

from app import messages
from app.domain.errors import DjinnError, EngineError
from app.domain.memory_map import MemoryMap, SessionMemory, StepCounts, TextUse, TierUse
from app.domain.values import SessionId, Ticket
from app.gpu.commands.sessions import Sessions
from app.gpu.commands.transfers import Exchange, Transfers
from app.gpu.commands.whitebox import Whitebox
from app.gpu.kv.phases import Phases
from app.gpu.kv.shutdown import ShutdownFlush
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns
from app.gpu.state.kv_header import KVFileHeader
from app.gpu.state.moves import Moved
from app.gpu.state.sequence import TokenSequence
from app.machine.handover import SocketTable
from app.messages import Command, Done, Event, Failed

logger = logging.getLogger(__name__)


class CommandHandler:
    """Carries out commands between two steps. Each is carried out whole, or raises and changes nothing."""

    def __init__(
        self,
        scheduler: Scheduler,
        phases: Phases,
        turns: Turns,
        whitebox: Whitebox,
        *,
        text: Callable[[], TextUse],
        steps: Callable[[], StepCounts],
        saved: Mapping[SessionId, KVFileHeader],
        refused: Collection[SessionId],
        connections: SocketTable,
    ) -> None:
        """`text` and `steps` are for the memory map. `saved` are the headers of KV files that an earlier server has
        left, `refused` the files that are of no use. `connections` lead to other servers.
        """
        placement = self._placement = scheduler.placement
        self._scheduler = scheduler
        self._phases = phases
        self._activations = turns.activations
        self._text, self._steps = text, steps
        self._connections = connections
        self._exchanges: dict[Ticket, tuple[Command, Exchange]] = {}
        """Commands that go on until they can be answered."""
        self._awaited: dict[int, Ticket] = {}
        """By the number of a move, the command that waits for it."""
        self._flush: ShutdownFlush | None = None
        """What is written before the engine stops."""
        sessions = self._sessions = Sessions(scheduler, phases, turns, saved, refused)
        transfers = self._transfers = Transfers(placement, sessions, turns.max_model_len, connections)
        self.on_session: dict[type[Command], Callable[[TokenSequence, Any], object]] = {
            messages.Submit: self._submit,
            messages.Resume: sessions.resume,
            messages.Cancel: sessions.cancel,
            messages.SetPhase: sessions.set_phase,
            messages.Fork: sessions.fork,
            messages.Rewind: sessions.rewind,
            messages.Close: sessions.close,
            messages.Export: transfers.export,
            messages.SendKV: transfers.send,
            messages.SendPrompt: transfers.send_prompt,
            messages.ReceivePrompt: transfers.receive_prompt,
            messages.PublishKV: lambda sequence, _: placement.tiers.cache.publish_copies(sequence),
            messages.FreeHost: lambda sequence, _: placement.free_host(sequence),
            **whitebox.handlers,
        }
        """What carries out a command about one session, which is given with it."""
        self.on_engine: dict[type[Command], Callable[[Any], object]] = {
            messages.Open: sessions.open,
            messages.Import: transfers.import_,
            messages.ReceiveKV: transfers.receive,
            messages.ComputePrompt: transfers.compute_prompt,
            messages.KeepKV: self._keep,
            messages.Restored: lambda _: sessions.delete_files(),
            messages.FreeDisk: lambda command: placement.give_way(-(-command.count // placement.tiers.block_bytes)),
            messages.Inspect: lambda _: self._memory(),
        }
        """What carries out any other command."""

    @property
    def sequences(self) -> Collection[TokenSequence]:
        """Every open session's sequence."""
        return self._sessions.sequences

    @property
    def is_due(self) -> bool:
        """Whether `tick` can go on although no move has ended."""
        return self._flush is not None and self._flush.is_due

    def handle(self, command: Command) -> list[Event]:
        """Carry out one command and answer it, or begin to. One that fails is answered by `Failed`.

        A handler returns what `Done` answers. If it returns events instead, they hold the answer, or it comes later.
        """
        try:
            if isinstance(command, messages.ServerCommand) or type(command) in self.on_engine:
                value = self.on_engine[type(command)](command)
            else:
                value = self.on_session[type(command)](self._sessions.find(command.session), command)
        except Exception as error:
            return self._fail(command, error)
        if isinstance(value, Generator):
            self._exchanges[command.ticket] = command, value
            return self._go_on(command.ticket)
        return value if isinstance(value, list) else [Done(command.ticket, value)]

    def _go_on(self, ticket: Ticket, report: Moved | None = None) -> list[Event]:
        """Resume an exchange, with the report that it has waited for if that has come; answer it if it is over."""
        command, exchange = self._exchanges[ticket]
        try:
            move = exchange.send(report)
        except StopIteration as end:
            answer: list[Event] = [Done(ticket, end.value)]
        except Exception as error:
            answer = self._fail(command, error)
        else:
            if move is not None:
                self._awaited[move.number] = ticket
            return []
        del self._exchanges[ticket]
        return answer

    def _fail(self, command: Command, error: Exception) -> list[Event]:
        """Answer a command that has failed. Nothing is sent over its connection, and nothing that comes is taken."""
        if not isinstance(error, DjinnError):
            logger.error("command %s failed", type(command).__name__, exc_info=error)
            error = EngineError(f"the command failed: {error}")
        if isinstance(command, messages.SendKV | messages.ReceiveKV | messages.SendPrompt | messages.ReceivePrompt):
            self._connections.discard(command.connection)
        return [Failed(command.ticket, error)]

    def _submit(self, sequence: TokenSequence, command: messages.Submit) -> list[Event]:
        self._sessions.submit(sequence, command)
        return self._transfers.hold(sequence, command)

    def _keep(self, command: messages.KeepKV) -> Exchange:
        """Write the KV of sessions, the first ones first. No signal moves KV any more."""
        self._phases.rest()
        sequences = tuple(self._sessions.find_all(command.sessions))
        flush = self._flush = ShutdownFlush(self._placement, sequences, self._placement.clock() + command.within_s)
        try:
            while not flush.go_on():
                yield None
        finally:
            self._flush = None
        kept, lost = ([each.computed for each in some] for some in (flush.kept, flush.lost))
        return messages.KeptKV(len(kept), sum(kept), len(lost), sum(lost))

    def tick(self) -> list[Event]:
        """Go on with what goes on between steps."""
        return [event for ticket in tuple(self._exchanges) for event in self._go_on(ticket)]

    def placed(self) -> list[Event]:
        """Sessions whose KV has changed its place or size since the last call."""
        placed = self._placement.take_placed()
        return [messages.Placed(s.session, self._session(s)) for s in placed if s.session in self._sessions]

    def moved(self, report: Moved) -> list[Event]:
        """Account for KV that has been moved."""
        self._placement.complete(report)
        self._phases.tick()
        ticket = self._awaited.pop(report.number, None)
        events = self._go_on(ticket, report) if ticket is not None and ticket in self._exchanges else []
        return [*events, *self.tick()]

    def _session(self, sequence: TokenSequence) -> SessionMemory:
        """Where one session's KV is. Sizes in bytes."""
        traffic, size, pool = sequence.traffic, self._placement.tiers.block_bytes, self._scheduler.cache.pool
        return SessionMemory(
            tokens=len(sequence.tokens),
            computed_tokens=sequence.computed,
            tier=sequence.tier,
            blocks=pool.kept_for(sequence.written),
            device_bytes=len(sequence.held) * size,
            host_bytes=len(sequence.copies) * size,
            disk_bytes=sequence.disk_blocks * size,
            bytes_out=traffic.bytes_out,
            bytes_in=traffic.bytes_in,
            restores=traffic.restores,
            block_tokens=pool.block_size,
            block_bytes=size,
            most_blocks=pool.kept_for(sys.maxsize),
            state_blocks=pool.extra_blocks,
        )

    def _memory(self) -> MemoryMap:
        """The engine's book-keeping. Sizes in bytes."""
        began = time.perf_counter()
        device, host, queue = self._scheduler.cache.pool, self._scheduler.cache.host, self._scheduler.queue
        placement, size = self._placement, self._placement.tiers.block_bytes
        return MemoryMap(
            text=self._text(),
            kv_total_bytes=device.num_blocks * size,
            kv_owned_bytes=device.owned * size,
            kv_cached_bytes=device.cached * size,
            block_bytes=size,
            block_tokens=device.block_size,
            most_blocks=device.kept_for(sys.maxsize),
            state_blocks=device.extra_blocks,
            sessions=len(self.sequences),
            sessions_by_tier=Counter(each.tier for each in self.sequences if each.tier is not None),
            host=TierUse(host.num_blocks * size, host.owned * size, host.cached * size),
            disk=TierUse(placement.disk_blocks * size, placement.tiers.file_blocks * size),
            moves=placement.meter.totals(),
            counts=placement.counts(),
            running=len(queue.running),
            waiting=len(queue.waiting),
            steps=self._steps(),
            drafts=self._scheduler.drafting.counts(),
            stack=self._activations.use(),
            seconds=time.perf_counter() - began,
        )
