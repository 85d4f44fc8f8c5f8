"""Carrying out the last command: KV goes to disk before the engine stops."""

from collections.abc import Iterable

from app.domain.values import Ticket
from app.gpu.kv.phases import Phases
from app.gpu.kv.placement import Placement
from app.gpu.kv.shutdown import ShutdownFlush
from app.gpu.state.sequence import TokenSequence
from app.messages import Done, Event, KeptKV


class KVKeeper:
    """Has KV written to disk, from `begin` on."""

    def __init__(self, placement: Placement, phases: Phases) -> None:
        self._placement = placement
        self._phases = phases
        self._keeping: ShutdownFlush | None = None
        self._ticket = Ticket(0)

    @property
    def is_due(self) -> bool:
        """Whether `tick` can go on although no move has ended."""
        return self._keeping is not None and self._keeping.is_due

    def begin(self, ticket: Ticket, sequences: Iterable[TokenSequence], within_s: float) -> None:
        """Begin with the first ones; `tick` answers. No signal moves KV any more."""
        self._phases.rest()
        self._keeping = ShutdownFlush(self._placement, tuple(sequences), self._placement.clock() + within_s)
        self._ticket = ticket

    def tick(self) -> list[Event]:
        """Go on, and answer the command when nothing more will be written."""
        if self._keeping is None:
            return []
        self._keeping.tick()
        if not self._keeping.is_over:
            return []
        kept, lost, self._keeping = self._keeping.kept, self._keeping.lost, None
        return [Done(self._ticket, KeptKV(len(kept), _tokens(kept), len(lost), _tokens(lost)))]


def _tokens(sequences: Iterable[TokenSequence]) -> int:
    return sum(sequence.computed for sequence in sequences)
