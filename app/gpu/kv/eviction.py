"""Room on the device and the host: which sessions give up their KV for another, and in which order. Planning only."""

import math
from collections.abc import Callable, Mapping, Sequence

from app.domain.values import KVPolicy, SessionId, Tier
from app.gpu.kv.lower import LowerTiers
from app.gpu.kv.moving import KVTiers
from app.gpu.kv.victim_order import VictimOrder
from app.gpu.state.sequence import TokenSequence


class Eviction:
    """Takes KV off the device, and out of host memory, until another session has room."""

    def __init__(
        self,
        tiers: KVTiers,
        lower: LowerTiers,
        policy: KVPolicy,
        victims: VictimOrder,
        *,
        resident: Mapping[SessionId, TokenSequence],
        active: dict[SessionId, TokenSequence],
        borrow: Callable[[int], int],
        refile: Callable[[TokenSequence], None],
    ) -> None:
        """`resident` and `active` are the lists of `Placement`, and `refile` is called when a session may belong in
        another. `borrow` gets device blocks from weights, as it has it.
        """
        self._tiers = tiers
        self._lower = lower
        self._policy = policy
        self._victims = victims
        self._resident = resident
        self._active = active
        self._borrow = borrow
        self._refile = refile
        self._pool = tiers.cache.pool
        self._awaited: dict[tuple[int, ...], int] = {}
        """So many host blocks will be there only once a move ends: by what must not have changed for that to hold."""

    def make_room(
        self,
        needed: int,
        for_sequence: TokenSequence,
        *,
        prefetch: bool = False,
        or_some: bool = False,
        may_lose: bool = True,
    ) -> bool:
        """Evict sessions without a turn until `needed` device blocks are available; returns whether they are now.

        - Evicted blocks may still be on their way out: ask again when a move has ended.
        - A `prefetch` evicts no session that returns before its own, and none of another tenant that has no more on
          the device than its own. It borrows nothing from weights.
        - If there cannot be that many blocks, no session is evicted, except with `or_some`.
        - Without `may_lose`, no session is evicted whose KV no lower tier has room for.
        - `for_sequence` itself loses nothing in any tier.
        """
        if self._pool.available >= needed:
            return True
        victims = self._victims.of(for_sequence.tenant if prefetch else None)
        back_at = for_sequence.return_time if prefetch else None
        most = self._pool.available + self._tiers.freeing + victims.blocks(back_at)
        if most < needed and (prefetch or not self._grow(needed - most)) and not or_some:
            return False
        for victim in victims.in_order(back_at):
            if self._pool.available + self._tiers.freeing >= needed:
                break
            if prefetch and not self._victims.may_ask(for_sequence.tenant, victim.tenant):
                continue  # others of it have given way in this look
            blocks = len(victim.blocks)
            if self.evict(victim, for_sequence, may_lose=may_lose):
                if prefetch:
                    self._victims.note(victim.tenant, -blocks)
            elif not (may_lose or self._lower.host_is_emptying):
                break  # there would hardly be room for the next
        if prefetch:
            self._victims.note(for_sequence.tenant, needed)
        return self._pool.available >= needed

    def evict(self, sequence: TokenSequence, for_sequence: TokenSequence, *, may_lose: bool = True) -> bool:
        """Take a session's KV off the device for another, or begin to. The KV is lost if no lower tier has room, and if
        it `may_lose` it.

        False while the host still makes room for it, and if it stays.
        """
        if self._policy is KVPolicy.NONE:
            self._lower.drop(sequence)
        elif sequence.tier is Tier.DEVICE and not self._tiers.park(sequence):
            room = self.make_host_room(len(sequence.blocks) - len(sequence.host_blocks), sequence, for_sequence)
            if not (room and self._tiers.park(sequence)) and may_lose and not self._lower.host_is_emptying:
                self._lower.drop(sequence)
        self._refile(sequence)
        return sequence.tier is not Tier.DEVICE

    def evict_together(self, sequences: Sequence[TokenSequence], for_sequence: TokenSequence) -> None:
        """`evict` all of them, with room on the host for all at once: else each would wait for the one before."""
        if self._policy is not KVPolicy.NONE:
            needed = sum(len(each.blocks) - len(each.host_blocks) for each in sequences)
            self._awaited.clear()  # what is under way may be for fewer of them
            self.make_host_room(needed, *sequences, for_sequence)
        for sequence in sequences:
            self.evict(sequence, for_sequence)

    def make_host_room(self, needed: int, *keep: TokenSequence) -> bool:
        """`LowerTiers.make_host_room`, with the sessions that may lose host blocks. Those whose turn waits do only for
        one that has a turn: with the file of a session that nobody waits for yet, the turn would wait for both.
        """
        host, has_turn = self._tiers.cache.host, any(each.busy for each in keep)
        if host.available >= needed:
            return True
        # Of all the sessions that could give way to one, each would go through all those that hold host blocks.
        if needed >= self._awaited.get(self._moment(has_turn), math.inf) and self._lower.host_is_emptying:
            return False
        on_device = (*self._active.values(), *self._resident.values())
        queued = tuple(reversed(self._active.values())) if has_turn else ()
        has_room = self._lower.make_host_room(needed, on_device, queued, keep)
        if not has_room and self._lower.host_is_emptying:
            self._awaited = {self._moment(has_turn): needed}
        return has_room

    def _moment(self, has_turn: bool) -> tuple[int, ...]:
        """What room on the host depends on, as far as it changes while moves are under way."""
        return *self._tiers.ledger.version, self._tiers.turned_round, self._tiers.cache.host.available, int(has_turn)

    def _grow(self, missing: int) -> bool:
        borrowed = self._borrow(missing)
        self._pool.grow(borrowed)
        return borrowed > 0
