"""Moving one session's KV between device, host and disk.

    device --park--> to_host --> host --save--> to_disk --> disk
    device <-- to_device <--restore-- host <-- to_host <--load-- disk

`KVFiles` orders the moves to and from disk. Pure book-keeping: a move is data that a mover carries out, and `complete`
accounts for its end. Until then the move holds a reference to each of its blocks, so no other session gets a block
that is being read or written. A new signal turns a move round: the KV counts as back at its source at once, and the
result of the move counts only if the sequence still wants it.
"""

from collections.abc import Sequence

from app.domain.values import SessionId, Tier
from app.gpu.kv.arrivals import Arrivals
from app.gpu.kv.cache import KVCache
from app.gpu.kv.ledger import MoveLedger
from app.gpu.kv.session_files import KVFiles
from app.gpu.state.blocks import BlockId
from app.gpu.state.moves import WHOLE_PASSES, HalfPass, Move, Moved, MoveKind
from app.gpu.state.sequence import TokenSequence


class KVTiers:
    """Carries sequences from tier to tier."""

    def __init__(self, cache: KVCache, block_bytes: int, num_layers: int) -> None:
        """Each of the model's layers has the same share of `block_bytes`."""
        self.cache = cache
        self.block_bytes = block_bytes
        self._num_layers = num_layers
        self.ledger = MoveLedger(cache.pool, cache.host)
        self.turned_round = 0
        self._freed_at = 0
        self._freed: dict[SessionId, int] = {}
        """What each park frees, as of that many changes of the pool."""
        self.files = KVFiles(cache, self.ledger)
        self._arrivals = Arrivals(cache, block_bytes)

    @property
    def freeing(self) -> int:
        """Device blocks that become available when the parks under way have ended."""
        changes = self.cache.pool.changes
        if self._freed_at != changes:
            self._freed_at, self._freed = changes, {}
        parking = [s for s in self.ledger.moving if s.moving is Tier.TO_HOST]
        self._freed |= {s.session: self._freed_by_park(s) for s in parking if s.session not in self._freed}
        return sum(self._freed[s.session] for s in parking)

    def park(self, sequence: TokenSequence) -> bool:
        """Move the KV from the device to the host; clean blocks cost nothing.

        False, and the KV stays, if the host has no room for the others.
        """
        sequence.require_tier(Tier.DEVICE)
        self.cache.release_blocks(sequence, self.cache.pool.blocks_for(sequence.written))
        sequence.moving = Tier.TO_HOST
        self._end_park(sequence)
        return sequence.tier is not Tier.DEVICE

    def copy_out(self, sequence: TokenSequence, end: int, *, early: bool = False) -> bool:
        """Copy the first `end` blocks of a session to the host; it stays on the device. False: no room."""
        sequence.require_tier(Tier.DEVICE)
        return sequence.outgoing is not None or self._copy_out(sequence, end, early=early)

    def restore_need(self, sequence: TokenSequence) -> int:
        """Available device blocks that `restore` would take."""
        sequence.require_tier(Tier.HOST)
        if sequence.incoming is not None:
            return 0
        return self._taken(self._find_on_device(sequence))

    def restore(self, sequence: TokenSequence) -> bool:
        """Move the KV from the host to the device. False, and nothing is changed, if too few blocks are available.

        Blocks whose content the device still has are not copied.
        """
        sequence.require_tier(Tier.HOST)
        if sequence.incoming is None:
            found = self._find_on_device(sequence)
            if self._taken(found) > self.cache.pool.available:
                return False
            self._copy_in(sequence, found)
        if sequence.incoming is not None:
            sequence.moving = Tier.TO_DEVICE
        return True

    def turn_round(self, sequence: TokenSequence) -> None:
        """Give up the move that is under way, if any: the KV is back at its source at once."""
        if sequence.moving is not None:
            self.turned_round += 1
            sequence.moving = None

    def head_back(self, sequence: TokenSequence) -> None:
        """Turn round a move that leads away from the device."""
        if sequence.moving is Tier.TO_DISK or (sequence.moving is Tier.TO_HOST and sequence.blocks):
            self.turn_round(sequence)

    def cut(self, sequence: TokenSequence, length: int) -> None:
        """Forget the KV from position `length` on, in every tier; moves under way no longer count."""
        if length < sequence.computed:
            self._detach(sequence)
            self.cache.uncompute(sequence, length)

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        """Cut the history to `length` tokens, and its KV with it."""
        self.cut(sequence, length)
        del sequence.tokens[length:]
        sequence.reached = min(sequence.reached, length)
        sequence.interventions.truncate(length)
        sequence.captures.cut(length)

    def forget_half_pass(self, sequence: TokenSequence) -> None:
        """Free the blocks that only a paused pass has written to."""
        if sequence.written > sequence.computed:
            self._detach(sequence)
            self.cache.uncompute(sequence, sequence.computed)

    def end_pass(self, sequence: TokenSequence) -> None:
        """Discard copies under way: they read blocks that a paused pass had half written."""
        sequence.outgoing = None

    def drop(self, sequence: TokenSequence) -> None:
        """Lose the KV in every tier; it will be recomputed."""
        self._detach(sequence)
        self.cache.uncompute(sequence, 0)
        self.files.forget(sequence)

    def complete(self, report: Moved) -> tuple[Move, TokenSequence]:
        """Account for a move that has ended or failed; returns it and its sequence."""
        move, sequence = self.ledger.find(report.number)
        worth = self._arrivals.book(sequence, move, arrived=report.error is None, computed=report.computed)
        self.ledger.close(move)
        if not worth and move.kind is MoveKind.TO_DISK:
            self.files.forget(sequence)
        elif not worth:
            self.drop(sequence)
        if sequence.moving is Tier.TO_HOST and sequence.blocks:
            self._end_park(sequence)
        return move, sequence

    def _detach(self, sequence: TokenSequence) -> None:
        self.turn_round(sequence)
        sequence.outgoing = sequence.incoming = None

    def _copy_out(self, sequence: TokenSequence, end: int, *, early: bool = False) -> bool:
        """Order copies of the blocks before index `end` that have none. Content that the host already has is shared."""
        host = self.cache.host
        while len(sequence.host_blocks) < min(end, len(sequence.hashes)):
            found = host.find(sequence.hashes[len(sequence.host_blocks)])
            if found is None:
                break
            host.share([found])
            sequence.host_blocks.append(found)
        first = len(sequence.host_blocks)
        if host.available < end - first:
            return False
        if end > first:
            source, target = tuple(sequence.blocks[first:end]), tuple(host.allocate(end - first))
            self.cache.pool.share(source)
            sequence.plain_to = 0  # the last block may be among them
            half = self._half_pass(sequence, first, end)
            sequence.outgoing = self.ledger.order(
                sequence,
                MoveKind.OUT,
                source=source,
                target=target,
                first=first,
                hashes=tuple(sequence.hashes[first:end]),
                half=half,
                bytes_left_out=self._bytes_above(half),
                computed=sequence.written,
                early=early,
            )
        return True

    def _end_park(self, sequence: TokenSequence) -> None:
        """Go on with a park: copy blocks without a copy; once every block has one, free the device blocks."""
        if sequence.outgoing is not None:
            return
        if not self._copy_out(sequence, len(sequence.blocks)):
            sequence.moving = None
        elif sequence.outgoing is None:
            sequence.moving = None
            self.cache.release_blocks(sequence, 0)

    def _copy_in(self, sequence: TokenSequence, found: Sequence[BlockId | None]) -> None:
        """Order copies of the host blocks whose content was not `found` on the device."""
        pool = self.cache.pool
        pool.share([block for block in found if block is not None])
        source = tuple(host for host, block in zip(sequence.host_blocks, found, strict=True) if block is None)
        target = tuple(pool.allocate(len(source)))
        fresh = iter(target)
        blocks = tuple(next(fresh) if block is None else block for block in found)
        if not source:
            sequence.blocks = list(blocks)
            return
        self.cache.host.share(source)
        half = self._half_pass(sequence, 0, len(blocks))  # none of its blocks has a hash to be found by
        sequence.incoming = self.ledger.order(
            sequence,
            MoveKind.IN,
            source=source,
            target=target,
            blocks=blocks,
            half=half,
            bytes_left_out=self._bytes_above(half),
        )

    def _half_pass(self, sequence: TokenSequence, first: int, end: int) -> HalfPass:
        """What of the sequence's blocks `[first, end)` only a paused pass has written to."""
        paused = sequence.paused_pass
        if paused is None or not paused.held or paused.boundary == self._num_layers:
            return WHOLE_PASSES
        whole = self.cache.pool.blocks_for(sequence.computed)
        return HalfPass(max(0, end - max(first, whole)), paused.boundary)

    def _bytes_above(self, half: HalfPass) -> int:
        """Those of the layers that the half pass has not run."""
        return half.blocks * (self._num_layers - half.layers) * self.block_bytes // self._num_layers

    def _find_on_device(self, sequence: TokenSequence) -> list[BlockId | None]:
        """For each host block of the sequence, the device block with the same content, if there is one."""
        count = len(sequence.host_blocks)
        found = self.cache.pool.find_all(sequence.hashes[:count])
        return found + [None] * (count - len(found))

    def _taken(self, found: Sequence[BlockId | None]) -> int:
        """Available device blocks that a restore takes: all but the found ones that a session holds."""
        held = sum(self.cache.pool.holders(block) > 0 for block in found if block is not None)
        return len(found) - held

    def _freed_by_park(self, sequence: TokenSequence) -> int:
        copying = set() if sequence.outgoing is None else set(sequence.outgoing.source)
        return sum(self.cache.pool.holders(block) == 1 + (block in copying) for block in sequence.blocks)
