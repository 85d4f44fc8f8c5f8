"""Commands: each goes to the code that carries it out, and is answered once."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from app.domain.errors import DjinnError
from app.domain.values import SessionId
from app.gpu.commands.inspection import Inspector
from app.gpu.commands.remote_prefill import PromptReceiver, PromptSender
from app.gpu.commands.sessions import Sessions
from app.gpu.commands.transfers import RestartKV, Transfers
from app.gpu.commands.whitebox import Whitebox
from app.gpu.kv.phases import Phases
from app.gpu.kv.stream import PromptStreams
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns
from app.gpu.state.kv_header import KVFileHeader
from app.gpu.state.moves import Moved, MoveKind
from app.gpu.state.sequence import TokenSequence
from app.messages import (
    Cancel,
    Close,
    Command,
    ComputePrompt,
    Done,
    Event,
    Export,
    Fork,
    FreeDisk,
    FreeHost,
    Import,
    Inspect,
    KeepKV,
    Open,
    Placed,
    PublishKV,
    ReceiveKV,
    ReceivePrompt,
    Restored,
    Resume,
    Rewind,
    SendKV,
    SendPrompt,
    SetPhase,
    Submit,
)


class CommandHandler:
    """Carries out commands between two steps. Each is carried out whole, or raises and changes nothing."""

    def __init__(
        self,
        scheduler: Scheduler,
        phases: Phases,
        turns: Turns,
        whitebox: Whitebox,
        inspector: Inspector,
        *,
        saved: Mapping[SessionId, KVFileHeader],
        refused: Collection[SessionId],
        transports: PromptStreams,
    ) -> None:
        """`saved` are the headers of KV files that an earlier server has left, `refused` the files that are of no use.
        `transports` lead to other servers.
        """
        placement = self._placement = scheduler.placement
        self._phases = phases
        self._inspector = inspector
        self._transports = transports
        restarts = self._restarts = RestartKV(placement, phases, saved, refused)
        sessions = self._sessions = Sessions(scheduler, phases, turns, restarts.claim)
        sent = self._sent = PromptSender(placement, sessions, transports)
        received = self._received = PromptReceiver(placement, transports)
        transfers = self._transfers = Transfers(placement, sessions, turns.max_model_len, transports)
        self.on_session: dict[type[Command], Callable[[TokenSequence, Any], object]] = {
            Submit: self._submit,
            Resume: sessions.resume,
            Cancel: sessions.cancel,
            SetPhase: sessions.set_phase,
            Fork: sessions.fork,
            Rewind: sessions.rewind,
            Close: sessions.close,
            Export: transfers.export,
            SendKV: transfers.send,
            SendPrompt: sent.begin,
            ReceivePrompt: received.receive,
            PublishKV: lambda sequence, _: placement.tiers.cache.publish_copies(sequence),
            FreeHost: lambda sequence, _: placement.free_host(sequence),
            **whitebox.handlers,
        }
        """What carries out a command about one session, which is given with it."""
        self.on_engine: dict[type[Command], Callable[[Any], object]] = {
            Open: sessions.open,
            Import: transfers.import_,
            ReceiveKV: transfers.receive,
            ComputePrompt: lambda command: received.compute(command, sessions.find_all([command.session])),
            KeepKV: lambda command: restarts.keep(command, sessions.find_all(command.sessions)),
            Restored: lambda _: restarts.delete_rest(),
            FreeDisk: lambda command: placement.give_way(-(-command.count // placement.tiers.block_bytes)),
            Inspect: lambda _: inspector.memory(self.sequences),
        }
        """What carries out any other command."""

    @property
    def sequences(self) -> Collection[TokenSequence]:
        """Every open session's sequence."""
        return self._sessions.sequences

    @property
    def is_due(self) -> bool:
        """Whether `tick` can go on although no move has ended."""
        return self._restarts.is_due

    def handle(self, command: Command) -> list[Event]:
        """Carry out one command and answer it, or begin to. Raises DjinnError if the session or its state does not
        allow it.

        A handler returns what `Done` answers. If it returns events instead, they hold the answer, or it comes later.
        """
        on_session = self.on_session.get(type(command))
        try:
            if on_session is not None:
                value = on_session(self._sessions.find(command.session), command)  # type: ignore[union-attr]
            else:
                value = self.on_engine[type(command)](command)
        except DjinnError:
            if isinstance(command, SendKV | ReceiveKV | SendPrompt | ReceivePrompt):
                self._transports.end(command.connection)  # nothing is sent over it, and nothing that comes is taken
            raise
        return value if isinstance(value, list) else [Done(command.ticket, value)]

    def _submit(self, sequence: TokenSequence, command: Submit) -> list[Event]:
        self._sessions.submit(sequence, command)
        return self._received.hold(sequence, command)

    def tick(self) -> list[Event]:
        """Go on with what goes on between steps."""
        return [*self._restarts.tick(), *self._received.go_on(), *self._sent.go_on()]

    def placed(self) -> list[Event]:
        """Sessions whose KV has changed its place or size since the last call."""
        placed = self._placement.take_placed()
        return [Placed(s.session, self._inspector.session(s)) for s in placed if s.session in self._sessions]

    def moved(self, report: Moved) -> list[Event]:
        """Account for KV that has been moved."""
        move = self._placement.complete(report)
        self._phases.tick()
        events: list[Event] = []
        match move.kind:
            case MoveKind.SEND_PROMPT:
                events = self._sent.finish(move, report)
            case MoveKind.RECEIVE_PROMPT:
                events = self._received.finish(move, report)
            case MoveKind.EXPORT | MoveKind.IMPORT | MoveKind.SEND | MoveKind.RECEIVE:
                events = self._transfers.finish(move, report)
        return [*events, *self._transfers.go_on()]
