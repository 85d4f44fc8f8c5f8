"""Which turn gives up its blocks for another. Pure planning: no tensors.

Of several tenants, the one whose turns hold the most blocks gives (max-min fairness; Bertsekas and Gallager, *Data
Networks*, 1992, section 6.5). Guaranteed KV counts for no tenant, and no tenant gives it up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from app.domain.values import Tier
from app.gpu.planning.queue import ActiveTurn, TurnQueue
from app.gpu.state.sequence import TokenSequence

SLICE_STEPS = 2
"""A tenant's last turn that runs has so many steps before it gives way: a step of progress for each way that its KV
moves then."""


class RoomShares:
    """Compares what the turns of each tenant hold on the device."""

    def __init__(self, queue: TurnQueue, block_size: int) -> None:
        self._queue = queue
        self._block_size = block_size
        self._steps = 0
        self.too_early = False
        """Whether in this step a turn would have given its blocks, had it run for longer: it may in a later one."""

    def begin_step(self) -> None:
        """Count a step. Call it once for each."""
        self._steps += 1
        self.too_early = False

    def note_start(self, active: ActiveTurn) -> None:
        """Note that a turn runs from now on."""
        active.turn.slice_began = self._steps
        active.turn.slice_reached = active.sequence.reached

    def claim(self, sequence: TokenSequence) -> int:
        """Blocks that a sequence with a turn has; if it runs, also those that its other tokens and one more need."""
        return max(len(sequence.blocks), self._needs(sequence) if self._runs(sequence) else 0)

    def givers(self, asking: TokenSequence) -> list[TokenSequence]:
        """The sequences that give up their claims for the one that is `asking`, in this order; all of them may be too
        few.

        They are of tenants that claim more than the tenant that asks would then. So no turn takes its room back by the
        same right. A tenant gives its last turn that runs only to one without any, and not before that turn has come
        further for some steps: so every turn ends.
        """
        if not self._queue.is_shared:
            return []
        places, found = self._places(), list[TokenSequence]()
        held = self._held(places)
        others = [each for each in places.get(asking.tenant, ()) if each is not asking]
        wanted, turns = self._needs(asking) + sum(map(self.claim, others)), self._queue.turns_of(asking.tenant)
        places.pop(asking.tenant, None)
        while richer := [tenant for tenant in places if held[tenant] > wanted]:
            largest = max(richer, key=held.__getitem__)
            giver = places[largest].pop()
            if not places[largest] and self._runs(giver) and (turns or not self._had_slice(giver)):
                self.too_early |= not turns
                del places[largest]
                continue
            found.append(giver)
            held[largest] -= self.claim(giver)
        return found

    def weakest(self, asking: TokenSequence) -> TokenSequence | None:
        """The sequence with the weakest claim to its blocks: the last in the queue, then the youngest that runs. It is
        one of the tenant that holds the most, unless that tenant has only one turn that runs.

        That may be the session that asks, unless no other is left.
        """
        waiting = [each for each in self._waiting() if each is not asking]
        if waiting:
            return self._of_largest(waiting, asking, at_least=1)[-1]
        running = [each for each in self._running() if each is asking or not each.guaranteed]
        return None if running in ([], [asking]) else self._of_largest(running, asking, at_least=2)[-1]

    def _of_largest(self, sequences: list[TokenSequence], asking: TokenSequence, at_least: int) -> list[TokenSequence]:
        """Those of the tenant that holds the most, if they are `at_least` so many; all, if it holds no more than the
        tenant that asks. Two or more: so the oldest that runs is never the last of them.
        """
        if not self._queue.is_shared:
            return sequences
        held = self._held(self._places())
        largest = max(held, key=held.__getitem__, default=asking.tenant)
        if largest != asking.tenant and held[largest] <= held[asking.tenant]:
            return sequences
        of_largest = [each for each in sequences if each.tenant == largest]
        return of_largest if len(of_largest) >= at_least else sequences

    def _needs(self, sequence: TokenSequence) -> int:
        return len(sequence.tokens) // self._block_size + 1

    def _held(self, places: Mapping[str, Iterable[TokenSequence]]) -> Counter[str]:
        return Counter({tenant: sum(map(self.claim, place)) for tenant, place in places.items()})

    def _places(self) -> dict[str, list[TokenSequence]]:
        """By tenant, those on the device that can give way: the oldest that runs first, the last that waits last."""
        places: dict[str, list[TokenSequence]] = {}
        for sequence in (*self._running(), *self._waiting()):
            if not sequence.guaranteed:
                places.setdefault(sequence.tenant, []).append(sequence)
        return places

    def _running(self) -> Iterator[TokenSequence]:
        return (active.sequence for active in self._queue.running.values())

    def _waiting(self) -> Iterator[TokenSequence]:
        """Those that wait with their KV on the device, and may give way."""
        waiting = (active.sequence for active in self._queue.waiting.values())
        return (each for each in waiting if each.tier is Tier.DEVICE and not each.guaranteed)

    def _runs(self, sequence: TokenSequence) -> bool:
        return sequence.session in self._queue.running

    def _had_slice(self, sequence: TokenSequence) -> bool:
        """Whether a turn that runs has come further than ever, and has run for some steps."""
        turn = sequence.turn
        if turn is None:
            return False
        return sequence.reached > turn.slice_reached and self._steps >= turn.slice_began + SLICE_STEPS
