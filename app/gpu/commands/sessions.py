"""Carrying out commands about a whole session, and about its turn."""

import hashlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping

from app import messages
from app.domain.errors import Busy, ContextTooLong, FieldOutOfRange, MalformedRequest, NotFound, WrongState
from app.domain.values import FinishReason, Residency, SessionId, common_prefix
from app.gpu.kv.phases import Phases
from app.gpu.kv.tiers import file_namespace
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.kv_header import KVFileHeader
from app.gpu.state.sequence import TokenSequence
from app.messages import Done, Event

RETRY_AFTER_S = 1


class Sessions:
    """Knows every open session's sequence. A command either is carried out whole or raises and changes nothing."""

    def __init__(
        self,
        scheduler: Scheduler,
        phases: Phases,
        turns: Turns,
        saved: Mapping[SessionId, KVFileHeader],
        refused: Collection[SessionId],
    ) -> None:
        """`saved` are the headers of KV files that an earlier server has left; those that are `refused` are damaged or
        of another model. None is deleted before every session has been opened and could claim its own.
        """
        self._scheduler = scheduler
        self._placement = scheduler.placement
        self._phases = phases
        self._turns = turns
        self._activations = turns.activations
        self._saved = dict(saved)
        self._refused = refused
        self._sequences: dict[SessionId, TokenSequence] = {}
        self._own_blocks = scheduler.cache.pool.num_blocks
        """Device blocks without those that weights lend, and take back."""

    @property
    def sequences(self) -> Collection[TokenSequence]:
        """Every open session's sequence."""
        return self._sequences.values()

    def __contains__(self, session: SessionId) -> bool:
        return session in self._sequences

    def find(self, session: SessionId) -> TokenSequence:
        """The session of that id. Raises `NotFound`."""
        if session not in self._sequences:
            raise NotFound(f"there is no session {session}")
        return self._sequences[session]

    def find_all(self, sessions: Iterable[SessionId]) -> Iterator[TokenSequence]:
        """Those of these sessions that are open."""
        return (self._sequences[session] for session in sessions if session in self._sequences)

    def open(self, command: messages.Open) -> None:
        """Make a session known, with the KV of its file. Raises `Busy` if no more residency can be guaranteed."""
        if command.residency is Residency.GUARANTEED:
            self._check_reserve()
        sequence = make_sequence(command)
        sequence.breakpoints = {each.id: each for each in command.breakpoints}
        self._claim(sequence)
        self.add(sequence)

    def add(self, sequence: TokenSequence) -> None:
        """Make a session without a turn known."""
        self._placement.end_turn(sequence)
        self._sequences[sequence.session] = sequence

    def _claim(self, sequence: TokenSequence) -> None:
        """Give a session that has just been opened the KV in its file, up to the first token that differs."""
        saved = self._saved.pop(sequence.session, None)
        if saved is None:
            return
        computed = saved.computed_tokens
        same = common_prefix(tuple(sequence.tokens), tuple(saved.token_ids))
        if same < computed and self._scheduler.cache.pool.state_blocks:
            same = 0  # the state in the file is of more tokens
        if same and saved.namespace == file_namespace(sequence, computed):  # imported KV has none, and is never shared
            self._placement.adopt(sequence, min(same, computed), saved.blocks, saved.first)
        else:
            self._placement.tiers.delete_file(sequence)

    def delete_files(self) -> None:
        """Delete the files that no session has claimed, as every session has been opened."""
        for session in (*self._saved, *self._refused):
            self._placement.tiers.delete_file(TokenSequence(session, b""))
        self._placement.count_disk_failures(len(self._refused))
        self._saved, self._refused = {}, ()

    def require_place(self, command: messages.ReceiveKV) -> None:
        """Raise `WrongState` if the session is here already, and what `open` raises if its residency cannot be
        guaranteed.
        """
        if command.session in self._sequences:
            raise WrongState(f"session {command.session} is here already")
        if command.residency is Residency.GUARANTEED:
            self._check_reserve()

    def set_phase(self, sequence: TokenSequence, command: messages.SetPhase) -> None:
        """Note what the client says of its session. Raises `WrongState`."""
        require_rest(sequence)
        resume_in_s = None if command.resume_in_ms is None else command.resume_in_ms / 1000
        self._phases.signal(sequence, command.phase, resume_in_s)

    def fork(self, parent: TokenSequence, command: messages.Fork) -> int:
        """Open the child; returns the number of its tokens. Raises `WrongState`, `ActivationsFull`."""
        require_rest(parent)
        if (parent.turn is None) != (command.turn is None):
            raise WrongState(f"session {command.session} is {'idle' if parent.turn is None else 'paused'}")
        if parent.checkpoint is not None:
            self._activations.check(parent, parent.checkpoint.hidden.nbytes, besides=True)
        child = self._scheduler.cache.fork(parent, command.child)
        self._activations.note(child)
        if parent.turn is not None and command.turn is not None:
            child.turn = parent.turn.fork(command.turn)
        self.add(child)
        return len(child.tokens)

    def rewind(self, sequence: TokenSequence, command: messages.Rewind) -> int:
        """Cut the history; returns the number of tokens left. Raises `WrongState`, `FieldOutOfRange`."""
        require_rest(sequence)
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
        del self._sequences[sequence.session]
        return [*events, Done(command.ticket)]

    def submit(self, sequence: TokenSequence, command: messages.Submit) -> None:
        """Begin a turn, whose end is the answer. Raises `WrongState`, `MalformedRequest`, `ContextTooLong`."""
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
        self._turns.begin(sequence, command, keep)
        self._phases.forget(sequence)

    def resume(self, sequence: TokenSequence, command: messages.Resume) -> list[Event]:
        """Let a paused turn go on under the command's ticket; its end is the answer. Raises `WrongState`, and
        `FieldOutOfRange` for a layer that it has passed.
        """
        turn, checkpoint = sequence.turn, sequence.checkpoint
        if turn is None or checkpoint is None or not turn.paused:
            raise WrongState(f"session {command.session} is not paused")
        began, until = time.perf_counter(), command.until
        lowest, highest = checkpoint.boundary, self._scheduler.num_layers - 1
        if until.layer is not None and not lowest <= until.layer <= highest:
            what = f"until.layer must be from {lowest} to {highest}: the session is paused after layer {lowest - 1}"
            raise FieldOutOfRange(what, param="until.layer")
        if until.layer is not None:
            turn.pause_at = until.layer + 1, checkpoint.first
        elif until.next_token:
            turn.pause_at = lowest, len(sequence.tokens)
        turn.ticket, turn.paused, turn.to_end = command.ticket, False, until.end
        self._scheduler.requeue(sequence)
        self._phases.forget(sequence)
        checkpoint.dispatch_ms = (time.perf_counter() - began) * 1000
        return []

    def cancel(self, sequence: TokenSequence, command: messages.Cancel) -> list[Event]:
        """End the turn. If it has just ended by itself, only cut the history."""
        turn, events = sequence.turn, list[Event]()
        if turn is not None and turn.ticket == command.turn:
            self._keep(sequence, turn.prompt_tokens, command.keep)
            events.append(self._turns.end(sequence, command.reason))
        elif turn is None and sequence.last_turn is not None and sequence.last_turn[0] == command.turn:
            self._keep(sequence, sequence.last_turn[1], command.keep)
            self._scheduler.retire(sequence)
        return [*events, Done(command.ticket, len(sequence.tokens))]

    def _keep(self, sequence: TokenSequence, prompt_tokens: int, keep: int | None) -> None:
        if keep is not None:
            self._placement.tiers.truncate(sequence, prompt_tokens + keep)

    def _check_reserve(self) -> None:
        """Raise `Busy` unless one more session can have a full context set aside, and one context be left for all
        others; `FieldOutOfRange` if the device is too small for any.
        """
        pool = self._scheduler.cache.pool
        context, block_size = pool.most_for(self._turns.max_model_len), pool.block_size
        reserved = sum(sequence.guaranteed for sequence in self.sequences)
        if 2 * context > self._own_blocks:
            raise FieldOutOfRange(
                f"residency cannot be guaranteed: the device has KV for {self._own_blocks * block_size} tokens, not "
                f"two contexts of {self._turns.max_model_len}; the server needs a larger --kv-device",
                param="residency",
            )
        if (reserved + 2) * context > self._own_blocks:
            raise Busy(
                f"the device has room to guarantee {self._own_blocks // context - 1} sessions of "
                f"{self._turns.max_model_len} tokens, and {reserved} are open",
                retry_after_s=RETRY_AFTER_S,
                param="residency",
            )


def require_rest(sequence: TokenSequence) -> None:
    """Raise `WrongState` unless the session is idle or paused."""
    if sequence.busy:
        raise WrongState(f"session {sequence.session} is running a turn")


def make_sequence(command: messages.Open | messages.ReceiveKV) -> TokenSequence:
    """The session that a command tells of. All of its history has had its KV elsewhere."""
    sequence = TokenSequence(
        command.session,
        namespace_hash(command.tenant if command.namespace is None else command.namespace),
        command.residency is Residency.GUARANTEED,
        list(command.token_ids),
        tenant=command.tenant,
        interventions=InterventionLog(command.interventions),
    )
    sequence.assume_computed()
    return sequence


def namespace_hash(name: str) -> bytes:
    """First parent of the chain of block hashes."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
