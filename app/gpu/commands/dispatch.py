"""Commands: each is carried out and answered once, those about a session and its turn here, others elsewhere."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import messages
from app.domain.errors import (
    ContextTooLong,
    DjinnError,
    EngineError,
    FieldOutOfRange,
    MalformedRequest,
    NotFound,
    WrongState,
)
from app.domain.memory_map import MemoryMap, SessionMemory, StepCounts, TextUse, TierUse
from app.domain.points import place_of
from app.domain.values import FinishReason, SessionId, Ticket, common_prefix
from app.gpu.commands.transfers import Exchange, Transfers
from app.gpu.commands.whitebox import Whitebox
from app.gpu.kv.phases import Phases, ShutdownFlush
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns
from app.gpu.state.moves import Moved
from app.gpu.state.sequence import TokenSequence
from app.machine.files import counted
from app.messages import Command, Done, Event, Failed

if TYPE_CHECKING:
    from app.gpu.models.adapters import Adapters

logger = logging.getLogger(__name__)

_AT_REST = (messages.SetPhase, messages.Fork, messages.Rewind, messages.Export, messages.SendKV)
"""Commands for sessions that are idle or paused."""


class CommandHandler:
    """Carries out commands between two steps. Each is carried out whole, or raises and changes nothing."""

    def __init__(
        self,
        scheduler: Scheduler,
        phases: Phases,
        turns: Turns,
        whitebox: Whitebox,
        transfers: Transfers,
        adapters: Adapters,
        *,
        text: Callable[[], TextUse],
        steps: Callable[[], StepCounts],
    ) -> None:
        """`text` and `steps` are for the memory map."""
        placement = self._placement = scheduler.placement
        self._scheduler = scheduler
        self._phases, self._turns, self._activations = phases, turns, turns.activations
        self._whitebox, self._transfers, self._adapters = whitebox, transfers, adapters
        self._text, self._steps = text, steps
        self._exchanges: dict[Ticket, tuple[Command, Exchange]] = {}
        """Commands that go on until they can be answered."""
        self._awaited: dict[int, Ticket] = {}
        """By the number of a move, the command that waits for it."""
        self.sessions = transfers.sessions
        self.on_session: dict[type[Command], Callable[[TokenSequence, Any], object]] = {
            messages.Submit: self.submit,
            messages.Resume: self.resume,
            messages.Cancel: self.cancel,
            messages.SetPhase: self.set_phase,
            messages.Fork: self.fork,
            messages.Rewind: self.rewind,
            messages.Close: self.close,
            messages.Export: transfers.export,
            messages.SendKV: transfers.send,
            messages.SendPrompt: transfers.send_prompt,
            messages.ReceivePrompt: transfers.receive_prompt,
            messages.PublishKV: lambda sequence, _: placement.tiers.cache.publish_copies(sequence),
            messages.FreeHost: lambda sequence, _: placement.free_host(sequence),
            messages.OpenMap: lambda sequence, command: whitebox.open_map(
                sequence, command, None if command.beside is None else self._open(command.beside)
            ),
            **whitebox.handlers,
        }
        """What carries out a command about one session, which is given with it."""
        self.on_engine: dict[type[Command], Callable[[Any], object]] = {
            messages.Open: transfers.open,
            messages.Import: transfers.import_,
            messages.ReceiveKV: transfers.receive,
            messages.ComputePrompt: transfers.compute_prompt,
            messages.KeepKV: self._keep_kv,
            messages.Restored: lambda _: transfers.delete_files(),
            messages.FreeDisk: lambda command: placement.give_way(-(-command.count // placement.tiers.block_bytes)),
            messages.Inspect: lambda _: self._memory(),
            messages.LoadAdapter: lambda command: adapters.load(Path(command.path)),
            messages.UnloadAdapter: self._unload_adapter,
            messages.LoadUpload: lambda command: whitebox.load_upload(command.path, command.digest),
            messages.DropUpload: lambda command: whitebox.drop_upload(command.digest, self.sequences),
            messages.ReadLogits: lambda command: whitebox.read_logits(
                [self._open(each) for each in command.sessions], command.token_ids
            ),
        }
        """What carries out any other command."""

    @property
    def sequences(self) -> Collection[TokenSequence]:
        """Those of all open sessions."""
        return self.sessions.values()

    @property
    def is_looking(self) -> bool:
        """Whether looks into the model are under way, which go on while there are no steps."""
        return bool(self._whitebox.gaps.looks)

    def handle(self, command: Command) -> list[Event]:
        """Carry out one command and answer it, or begin to. One that fails is answered by `Failed`.

        A handler returns what `Done` answers. If it returns events instead, they hold the answer, or it comes later.
        """
        try:
            if isinstance(command, messages.ServerCommand) or type(command) in self.on_engine:
                value = self.on_engine[type(command)](command)
            else:
                sequence = self._open(command.session)
                if sequence.busy and isinstance(command, _AT_REST):
                    raise WrongState(f"session {sequence.session} is running a turn")
                value = self.on_session[type(command)](sequence, command)
        except Exception as error:
            return self._fail(command, error)
        if isinstance(value, Generator):
            self._exchanges[command.ticket] = command, value
            return self._go_on(command.ticket)
        return value if isinstance(value, list) else [Done(command.ticket, value)]

    def _open(self, session: SessionId) -> TokenSequence:
        if session not in self.sessions:
            raise NotFound(f"there is no session {session}")
        return self.sessions[session]

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
            self._transfers.connections.discard(command.connection)
        return [Failed(command.ticket, error)]

    def _unload_adapter(self, command: messages.UnloadAdapter) -> None:
        """Forget an adapter. Raises `WrongState` while there are turns with it."""
        digest = command.digest
        turns = sum(each.adapter == digest and each.turn is not None for each in self.sequences)
        if turns:
            raise WrongState(f"{counted(turns, 'turn')} of its sessions wait, run or are paused: let them end first")
        self._adapters.unload(digest)

    def _keep_kv(self, command: messages.KeepKV) -> Exchange:
        """Write the KV of sessions, the first ones first. No signal moves KV any more."""
        self._phases.rest()
        sequences = tuple(self.sessions[each] for each in command.sessions if each in self.sessions)
        flush = ShutdownFlush(self._placement, sequences, self._placement.clock() + command.within_s)
        while not flush.go_on():
            yield None
        kept, lost = ([each.computed for each in some] for some in (flush.kept, flush.lost))
        return messages.KeptKV(len(kept), sum(kept), len(lost), sum(lost))

    def go_on(self, *, is_busy: bool) -> list[Event]:
        """Go on with what goes on between steps, as time or a message has made possible. `is_busy`: there are some."""
        self._whitebox.gaps.open(is_busy=is_busy)
        self._phases.tick()
        return [event for ticket in tuple(self._exchanges) for event in self._go_on(ticket)]

    def placed(self) -> list[Event]:
        """Sessions whose KV has changed its place or size since the last call."""
        placed = self._placement.take_placed()
        return [messages.Placed(s.session, self._session(s)) for s in placed if s.session in self.sessions]

    def moved(self, report: Moved) -> list[Event]:
        """Account for KV that has been moved; `go_on` follows."""
        self._placement.complete(report)
        ticket = self._awaited.pop(report.number, None)
        return self._go_on(ticket, report) if ticket is not None and ticket in self._exchanges else []

    def set_phase(self, sequence: TokenSequence, command: messages.SetPhase) -> None:
        """Note what the client says of its session."""
        resume_in_s = None if command.resume_in_ms is None else command.resume_in_ms / 1000
        self._phases.signal(sequence, command.phase, resume_in_s, command.lengths)

    def fork(self, parent: TokenSequence, command: messages.Fork) -> int:
        """Open the child; returns the number of its tokens. Raises `WrongState`, `ActivationsFull`."""
        if (parent.turn is None) != (command.turn is None):
            raise WrongState(f"session {command.session} is {'idle' if parent.turn is None else 'paused'}")
        if parent.checkpoint is not None:
            self._activations.check(parent, parent.checkpoint.nbytes, besides=True)
        child = self._scheduler.cache.fork(parent, command.child)
        self._activations.note(child)
        if parent.turn is not None and command.turn is not None:
            child.turn = parent.turn.fork(command.turn)
        self._transfers.add(child)
        return len(child.tokens)

    def rewind(self, sequence: TokenSequence, command: messages.Rewind) -> int:
        """Cut the history; returns the number of tokens left. Raises `WrongState`, `FieldOutOfRange`."""
        if sequence.turn is not None:
            raise WrongState(f"session {command.session} is paused")
        if not 0 <= command.to_token <= len(sequence.tokens):
            raise FieldOutOfRange(
                f"to_token is {command.to_token}; the session has {len(sequence.tokens)} tokens", param="to_token"
            )
        self._placement.tiers.truncate(sequence, command.to_token)
        self._placement.end_turn(sequence)
        self._phases.repeat(sequence)
        return len(sequence.tokens)

    def close(self, sequence: TokenSequence, command: messages.Close) -> list[Event]:
        """Forget the session, and end its turn if it has one."""
        events: list[Event] = []
        if sequence.turn is not None:
            events.append(self._turns.end(sequence, FinishReason.CANCELLED))
        self._phases.forget(sequence)
        self._activations.forget(sequence)
        self._placement.close(sequence)
        del self.sessions[sequence.session]
        return [*events, Done(command.ticket)]

    def submit(self, sequence: TokenSequence, command: messages.Submit) -> list[Event]:
        """Begin a turn, whose end is the answer. Raises `WrongState`, `MalformedRequest`, `ContextTooLong`,
        `AdapterMissing`, `ActivationsFull`, `UploadMissing`.
        """
        self._adapters.require(sequence.adapter)
        self._whitebox.require_uploads(sequence)
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
        above = command.above
        self._turns.begin(sequence, command, keep, None if above is None else self._whitebox.enter(sequence, above))
        self._phases.forget(sequence)
        return self._transfers.hold(sequence, command)

    def resume(self, sequence: TokenSequence, command: messages.Resume) -> list[Event]:
        """Let a paused turn go on; its end is the answer. Raises `WrongState`, `FieldOutOfRange` for a passed layer,
        `UploadMissing`.
        """
        turn, checkpoint = sequence.turn, sequence.checkpoint
        if turn is None or checkpoint is None or not turn.paused:
            raise WrongState(f"session {command.session} is not paused")
        self._whitebox.require_uploads(sequence)
        began, until = time.perf_counter(), command.until
        highest = self._scheduler.num_layers - 1
        if until.layer is not None:
            here = checkpoint.place < place_of(checkpoint.layer + 1, until.point)
            lowest = checkpoint.layer if here else checkpoint.layer + 1
            if not lowest <= until.layer <= highest:
                what = f"until.layer must be from {lowest} to {highest} for {until.point}: the session is paused at "
                raise FieldOutOfRange(f"{what}{checkpoint.point} of layer {checkpoint.layer}", param="until.layer")
            turn.pause_at = until.layer + 1, until.point, checkpoint.first, None
        elif until.next_token:
            turn.pause_at = checkpoint.layer + 1, checkpoint.point, len(sequence.tokens), None
        turn.ticket, turn.paused, turn.to_end = command.ticket, False, until.end
        self._scheduler.requeue(sequence)
        self._phases.forget(sequence)
        checkpoint.dispatch_ms = (time.perf_counter() - began) * 1000
        return []

    def cancel(self, sequence: TokenSequence, command: messages.Cancel) -> list[Event]:
        """End the turn. If it has just ended by itself, only cut the history."""
        turn, events = sequence.turn, list[Event]()
        last = sequence.last_turn if turn is None else (turn.ticket, turn.prompt_tokens)
        if last is not None and last[0] == command.turn:
            if command.keep is not None:
                self._placement.tiers.truncate(sequence, last[1] + command.keep)
            if turn is None:
                self._scheduler.retire(sequence)
            else:
                events.append(self._turns.end(sequence, command.reason))
        return [*events, Done(command.ticket, len(sequence.tokens))]

    def _session(self, sequence: TokenSequence) -> SessionMemory:
        """Where one session's KV is. Sizes in bytes."""
        size, pool = self._placement.tiers.block_bytes, self._scheduler.cache.pool
        return SessionMemory(
            tokens=len(sequence.tokens),
            computed_tokens=sequence.computed,
            tier=sequence.tier,
            blocks=pool.kept_for(sequence.written),
            device_bytes=sequence.held_count * size,
            host_bytes=sequence.copy_count * size,
            disk_bytes=sequence.disk_blocks * size,
            bytes_out=sequence.bytes_out,
            bytes_in=sequence.bytes_in,
            restores=sequence.restores,
            block_bytes=size,
            counts=pool.counts,
            host_room=self._scheduler.cache.host.num_blocks * size,
        )

    def _memory(self) -> MemoryMap:
        """The engine's book-keeping. Sizes in bytes."""
        began = time.perf_counter()
        device, host, queue = self._scheduler.cache.pool, self._scheduler.cache.host, self._scheduler.queue
        placement, size = self._placement, self._placement.tiers.block_bytes
        return MemoryMap(
            text=self._text(),
            adapters=self._adapters.use(),
            device=TierUse(device.num_blocks * size, device.owned * size, device.cached * size),
            block_bytes=size,
            blocks=device.counts,
            sessions=len(self.sequences),
            sessions_by_tier=Counter(each.tier for each in self.sequences if each.tier is not None),
            host=TierUse(host.num_blocks * size, host.owned * size, host.cached * size),
            disk=TierUse(placement.disk_blocks * size, placement.tiers.file_blocks * size),
            moves=placement.meter.totals(),
            counts=replace(placement.counts),
            running=len(queue.running),
            waiting=len(queue.waiting),
            steps=self._steps(),
            drafts=self._scheduler.drafting.counts(),
            stack=self._activations.use(),
            seconds=time.perf_counter() - began,
        )
