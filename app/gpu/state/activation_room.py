"""Room in host memory for the checkpoints and captures of all sessions together."""

from collections import Counter

from app.domain.errors import ActivationsFull
from app.domain.fair_room import leaves_as_much
from app.domain.memory_map import StackUse
from app.domain.values import SessionId
from app.gpu.state.checkpoints import Captured
from app.gpu.state.sequence import TokenSequence
from app.machine.units import size


class ActivationRoom:
    """Counts what each session holds of `max_bytes`. Each change of a session's checkpoint or captures calls `note`.

    Tenants share them as `leaves_as_much` says, where each checkpoint and capture is a thing. Without tenants nobody
    leaves room to others.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._checkpoints: dict[SessionId, int] = {}
        """Bytes of each session that has one; forks count the whole of what they share."""
        self._captures: dict[SessionId, int] = {}
        self._taken = 0
        self._of: Counter[str] = Counter()
        """By tenant."""

    def check(self, sequence: TokenSequence, checkpoint_bytes: int, *, besides: bool = False) -> None:
        """Raise `ActivationsFull` unless the session may have a checkpoint of so many bytes in place of its own, or
        `besides` it its tenant may.
        """
        more = checkpoint_bytes - (0 if besides else self._checkpoints.get(sequence.session, 0))
        if self._has_room(sequence.tenant, more):
            return
        own = self._of[sequence.tenant] if sequence.tenant else 0
        whose = f", {size(own)} of it of this tenant, who leaves others as much" if own else ""
        raise ActivationsFull(
            f"checkpoints and captures take {size(self._taken)} of the {size(self._max_bytes)} of max_activation_bytes"
            f"{whose}; this checkpoint needs {size(checkpoint_bytes)}: end paused turns, or delete captures",
            retry_after_s=1,
        )

    def capture(self, sequence: TokenSequence, captured: Captured) -> None:
        """Keep one more capture of the session, or count it as dropped if there is no room."""
        if self._has_room(sequence.tenant, captured.hidden.nbytes):
            sequence.captures.add(captured)
            self.note(sequence)
        else:
            sequence.captures.dropped += 1

    def note(self, sequence: TokenSequence) -> None:
        """Account for what the session holds now."""
        checkpoint = sequence.checkpoint
        self._set(sequence, self._checkpoints, 0 if checkpoint is None else checkpoint.hidden.nbytes)
        self._set(sequence, self._captures, sequence.captures.nbytes)

    def forget(self, sequence: TokenSequence) -> None:
        """The session is closed: it holds nothing."""
        self._set(sequence, self._checkpoints, 0)
        self._set(sequence, self._captures, 0)

    def use(self) -> StackUse:
        """What is held now."""
        checkpoint_bytes = sum(self._checkpoints.values())
        return StackUse(len(self._checkpoints), checkpoint_bytes, self._taken - checkpoint_bytes, dict(self._captures))

    def _has_room(self, tenant: str, more: int) -> bool:
        own = self._of[tenant] if tenant else 0
        return more <= 0 or leaves_as_much(self._max_bytes, taken=self._taken, more=more, besides=own, whole=more)

    def _set(self, sequence: TokenSequence, held: dict[SessionId, int], nbytes: int) -> None:
        more = nbytes - held.pop(sequence.session, 0)
        if nbytes:
            held[sequence.session] = nbytes
        self._taken += more
        self._of[sequence.tenant] += more
