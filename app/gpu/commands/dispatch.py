"""Dispatching each command to the code that carries it out, and answering it."""

from collections.abc import Callable, Collection

from app.domain.errors import NotFound
from app.gpu.commands.host_bound import HostBound
from app.gpu.commands.inspection import Inspector
from app.gpu.commands.kept_kv import KVKeeper
from app.gpu.commands.peer_kv import PeerKV
from app.gpu.commands.prompts_received import PromptReceiver
from app.gpu.commands.prompts_sent import PromptSender
from app.gpu.commands.saved_files import FilesFound, SavedFiles
from app.gpu.commands.session_files import SessionFiles
from app.gpu.commands.sessions import SessionHandler
from app.gpu.commands.turns import TurnHandler
from app.gpu.commands.whitebox.checkpoints import CheckpointHandler
from app.gpu.commands.whitebox.dispatch import look_inside
from app.gpu.kv.phases import Phases
from app.gpu.kv.stream import PromptStreams
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns
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
        checkpoints: CheckpointHandler,
        *,
        inspector: Inspector,
        files: FilesFound,
        discard: Callable[[int], None],
        ways: PromptStreams,
    ) -> None:
        """`discard` closes the connection of that number, which nothing is sent over. `ways` are those of prompts."""
        self._placement = scheduler.placement
        self._phases = phases
        self._ways = ways
        self._saved = SavedFiles(scheduler.placement, files)
        self._sessions = SessionHandler(scheduler, phases, turns, self._saved)
        self._received = PromptReceiver(scheduler.placement, ways)
        self._sent = PromptSender(scheduler.placement, self._sessions, ways)
        self._turns = TurnHandler(scheduler, phases, turns, self._received)
        self._checkpoints = checkpoints
        self._inspector = inspector
        self._host_bound = HostBound(scheduler.placement)
        self._session_files = SessionFiles(scheduler.placement, self._host_bound, turns.max_model_len)
        self._peer_kv = PeerKV(scheduler.placement, self._host_bound, self._sessions, discard)
        self.keeper = KVKeeper(scheduler.placement, phases)

    @property
    def sequences(self) -> Collection[TokenSequence]:
        """Every open session's sequence."""
        return self._sessions.sequences

    def handle(self, command: Command) -> list[Event]:
        """Carry out one command and answer it, or begin to. Raises DjinnError if the session or its state does not
        allow it.
        """
        sessions = self._sessions
        value: object = None
        match command:
            case Submit():
                return self._turns.submit(sessions.find(command.session), command)
            case Resume():
                return self._turns.resume(sessions.find(command.session), command)
            case Cancel():
                return self._turns.cancel(sessions.find(command.session), command)
            case Export():
                return self._session_files.export(sessions.find_resting(command.session), command)
            case Import():
                return self._session_files.import_(command)
            case SendKV():
                return self._peer_kv.send(command)
            case ReceiveKV():
                return self._peer_kv.receive(command)
            case PublishKV():
                self._placement.tiers.cache.publish_copies(sessions.find(command.session))
            case ReceivePrompt():
                return self._received.receive(self._whose(command), command)
            case ComputePrompt():
                if command.session in sessions:
                    self._received.compute(sessions.find(command.session), command)
            case SendPrompt():
                return self._sent.begin(self._whose(command), command)
            case KeepKV():
                found = (sessions.find(each) for each in command.sessions if each in sessions)
                self.keeper.begin(command.ticket, found, command.within_s)
                return []
            case Close():
                return [*sessions.close(command), Done(command.ticket)]
            case Open():
                sessions.open(command)
            case Fork():
                value = sessions.fork(command)
            case Rewind():
                value = sessions.rewind(command)
            case SetPhase():
                sessions.set_phase(command)
            case FreeHost():
                self._placement.free_host(sessions.find(command.session))
            case Restored():
                self._saved.delete_rest()
            case FreeDisk():
                self._placement.give_way(-(-command.count // self._placement.tiers.block_bytes))
            case Inspect():
                value = self._inspector.memory(self.sequences)
            case _:
                value = look_inside(sessions.find(command.session), command, self._checkpoints)
        return [Done(command.ticket, value)]

    def _whose(self, command: ReceivePrompt | SendPrompt) -> TokenSequence:
        """The session that a prompt is for. Raises `NotFound`; then what arrives for it is dropped."""
        try:
            return self._sessions.find(command.session)
        except NotFound:
            self._ways.end(command.connection)
            raise

    def tick(self) -> list[Event]:
        """Go on with what goes on between steps."""
        return [*self.keeper.tick(), *self._received.go_on(), *self._sent.go_on()]

    def placed(self) -> list[Event]:
        """Sessions whose KV has changed its place or size since the last call."""
        placed = self._placement.take_placed()
        return [Placed(s.session, self._inspector.session(s)) for s in placed if s.session in self._sessions]

    def moved(self, report: Moved) -> list[Event]:
        """Account for KV that has been moved."""
        move = self._placement.complete(report)
        self._phases.tick()
        events: list[Event] = []
        if move.kind in (MoveKind.EXPORT, MoveKind.IMPORT):
            events, imported = self._session_files.finish(move, report)
            if imported is not None:
                self._sessions.add(imported)
        if move.kind in (MoveKind.SEND, MoveKind.RECEIVE):
            events = self._peer_kv.finish(move, report)
        if move.kind is MoveKind.SEND_PROMPT:
            events = self._sent.finish(move, report)
        if move.kind is MoveKind.RECEIVE_PROMPT:
            events = self._received.finish(move, report)
        self._host_bound.go_on()
        return [*events, *self._peer_kv.go_on()]
