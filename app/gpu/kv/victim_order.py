"""Which sessions may be evicted, for a turn and for a prefetch. Pure planning."""

from collections import Counter
from collections.abc import Callable, Mapping

from app.domain.values import KVPolicy, SessionId
from app.gpu.kv.ledger import MoveLedger
from app.gpu.kv.prefetch import PrefetchMargin
from app.gpu.kv.victims import Victims
from app.gpu.state.sequence import TokenSequence


class VictimOrder:
    """Orders the sessions without a turn, and keeps the order until `forget`. A turn may ask all of them. A prefetch
    asks none of another tenant that has no more on the device than its own.
    """

    def __init__(
        self,
        resident: Mapping[SessionId, TokenSequence],
        active: Mapping[SessionId, TokenSequence],
        ledger: MoveLedger,
        policy: KVPolicy,
        clock: Callable[[], float],
        margin: PrefetchMargin,
    ) -> None:
        """`resident` and `active` are the sessions without and with a turn, as they are at any moment."""
        self._resident = resident
        self._active = active
        self._ledger = ledger
        self._policy = policy
        self._clock = clock
        self._margin = margin
        self._orders: dict[str | None, Victims] = {}
        """By the tenant that prefetches; None: for turns."""
        self._held = Counter[str]()
        """Device blocks by tenant, as prefetches of this order leave them."""

    def forget(self) -> None:
        """They may give way in another order now."""
        self._orders.clear()

    def of(self, prefetching: str | None) -> Victims:
        """Those that a tenant's prefetch may ask; None: those that a turn may ask."""
        found = self._orders.get(prefetching)
        if found is None:
            residents = [each for each in self._resident.values() if each.moving is None and not each.guaranteed]
            if prefetching is not None:
                self._held = self._held_by_tenant()
                residents = [each for each in residents if self.may_ask(prefetching, each.tenant)]
            if self._policy is KVPolicy.SIGNAL:
                found = Victims.by_return(residents, self._clock(), self._margin.seconds)
            else:
                found = Victims.in_given_order(residents)
            self._orders[prefetching] = found
        return found

    def may_ask(self, tenant: str, other: str) -> bool:
        """Whether prefetches of a tenant may take room from the other one, or itself, after those before them."""
        return tenant == other or self._held[other] > self._held[tenant]

    def note(self, tenant: str, blocks: int) -> None:
        """Note blocks that a tenant gets for a prefetch, or, negative, gives."""
        self._held[tenant] += blocks

    def _held_by_tenant(self) -> Counter[str]:
        """Device blocks, with those that restores under way will fill."""
        held = Counter[str]()
        for sequence in (*self._resident.values(), *self._active.values()):
            held[sequence.tenant] += len(sequence.blocks)
        for sequence in self._ledger.moving:
            held[sequence.tenant] += 0 if sequence.incoming is None else len(sequence.incoming.blocks)
        return held
