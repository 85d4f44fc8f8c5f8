"""Where one session's KV is, and every way from there.

    device --park--> to_host --> host --save--> to_disk --> disk
    device <-- to_device <--restore-- host <-- to_host <--load-- disk

Pure book-keeping: a move is data that a mover carries out, and `complete` accounts for its end. Until then the move
holds a reference to each of its blocks, so no other session gets a block that is being read or written.
`cancel_move` leads back at once: the KV counts as at its source, and the move that is under way goes on. Its result
counts only if the sequence still wants it. KV also leaves for files of clients and for other servers, and comes from
there: the session's tier stays as it is meanwhile.
"""

from collections.abc import Sequence
from typing import Any

from app.domain.memory_map import TierCounts
from app.domain.values import SessionId, Tier
from app.gpu.kv.cache import KVCache
from app.gpu.state.blocks import BlockHash, BlockId, BlockPool
from app.gpu.state.moves import WHOLE_PASSES, HalfPass, Move, Moved, MoveKind
from app.gpu.state.sequence import TokenSequence


class KVTiers:
    """Carries sequences from tier to tier, and knows every move that is under way."""

    def __init__(self, cache: KVCache, block_bytes: int, num_layers: int) -> None:
        """Each of the model's layers has the same share of `block_bytes`."""
        self.cache = cache
        self.block_bytes = block_bytes
        self._num_layers = num_layers
        self.in_flight: dict[int, tuple[Move, TokenSequence]] = {}
        """By number, each with the sequence that it was ordered for."""
        self.moving: dict[SessionId, TokenSequence] = {}
        """Sequences between two tiers, but for those that leave the device."""
        self.file_blocks = 0
        """Blocks in the files of all sessions."""
        self.saving = 0
        """Host blocks that become available when the saves under way have ended."""
        self.counts = TierCounts()
        """Those since the start."""
        self._orders: list[Move] = []
        self.last = 0
        """Number of the last move."""

    # What is under way.

    def order(self, sequence: TokenSequence, kind: MoveKind, **fields: Any) -> Move:
        """Begin a move; it takes over one reference to each of its blocks."""
        self.last += 1
        move = Move(self.last, kind, sequence.session, adapter=sequence.adapter, **fields)
        self._orders.append(move)
        self.in_flight[move.number] = move, sequence
        return move

    def take_orders(self) -> list[Move]:
        """The moves that have been ordered since the last call, for the mover."""
        orders, self._orders = self._orders, []
        return orders

    def held(self, pool: BlockPool) -> list[tuple[BlockId, ...]]:
        """Blocks of `pool` that moves under way hold."""
        moves = (move for move, _ in self.in_flight.values())
        return [blocks for move in moves for owner, blocks in self._held_by(move) if owner is pool]

    def _held_by(self, move: Move) -> list[tuple[BlockPool, tuple[BlockId, ...]]]:
        device, host = self.cache.pool, self.cache.host
        match move.kind:
            case MoveKind.OUT:
                return [(device, move.source), (host, move.target)]
            case MoveKind.IN:
                return [(host, move.source), (device, move.blocks)]
            case _:
                return [(host, move.source), (host, move.target)]

    def _begin(self, sequence: TokenSequence, to: Tier) -> None:
        """The KV is on its way: `to_host` from the device if there are blocks, else from disk."""
        sequence.moving = to
        self.saving += sequence.copy_count if to is Tier.TO_DISK else 0
        if sequence.blocks:
            self.cache.pool.expect_release(sequence.held)
        else:
            self.moving[sequence.session] = sequence

    def _rest(self, sequence: TokenSequence) -> None:
        """The KV is in one tier again."""
        self.saving -= sequence.copy_count if sequence.moving is Tier.TO_DISK else 0
        sequence.moving = None
        self.cache.pool.cancel_release(sequence.held)
        self.moving.pop(sequence.session, None)

    # From tier to tier.

    def park(self, sequence: TokenSequence) -> bool:
        """Move the KV from the device to the host; clean blocks cost nothing.

        False, and the KV stays, if the host has no room for the others.
        """
        assert sequence.tier is Tier.DEVICE
        self.cache.trim(sequence, sequence.written)
        self._begin(sequence, Tier.TO_HOST)
        self._go_on_parking(sequence)
        return sequence.tier is not Tier.DEVICE

    def _go_on_parking(self, sequence: TokenSequence) -> None:
        """Copy blocks without a copy; once every block has one, free the device blocks."""
        if sequence.outgoing is not None:
            return
        has_room = self.copy_out(sequence, len(sequence.blocks))
        if sequence.outgoing is None:
            self._rest(sequence)
            if has_room:
                self.cache.release_blocks(sequence, 0)

    def copy_out(self, sequence: TokenSequence, end: int, *, early: bool = False) -> bool:
        """Copy the blocks before index `end`, which ends a stripe or the state, that have no copy, to the host, if no
        copies are under way; they stay on the device. Content that the host already has is shared. False: no room.
        """
        if sequence.outgoing is not None:
            return True
        host = self.cache.host
        while sequence.copied < end and (found := self.cache.next_copies(sequence)):
            self.cache.hold_copies(sequence, found, sequence.behind)
        first = sequence.copied
        source = tuple(host.groups.held(sequence.blocks[first:end], sequence.behind - first))
        if host.available < len(source):
            return False
        if source:
            target = tuple(host.allocate(len(source)))
            self.cache.pool.share(source)
            self.cache.pool.expect_release(source)
            sequence.fast_path_until = 0  # the last block may be among them
            sequence.outgoing = self.order(
                sequence,
                MoveKind.OUT,
                source=source,
                target=target,
                first=first,
                behind=sequence.behind,
                hashes=tuple(self.cache.held_hashes(sequence, first, end)),
                half=self._half_pass(sequence, first, end),
                computed=sequence.written,
                early=early,
            )
        return True

    def restore_need(self, sequence: TokenSequence) -> int:
        """Available device blocks that `restore` would take."""
        assert sequence.tier is Tier.HOST
        return 0 if sequence.incoming is not None else self._taken(self._find_on_device(sequence))

    def restore(self, sequence: TokenSequence) -> bool:
        """Move the KV from the host to the device. False, and nothing is changed, if too few blocks are available.

        Blocks whose content the device still has are not copied.
        """
        assert sequence.tier is Tier.HOST
        if sequence.incoming is None:
            pool, found = self.cache.pool, self._find_on_device(sequence)
            if self._taken(found) > pool.available:
                return False
            pool.share([block for block in found if block is not None])
            source = tuple(host for host, block in zip(sequence.copies, found, strict=True) if block is None)
            target = tuple(pool.allocate(len(source)))
            fresh = iter(target)
            blocks = tuple(next(fresh) if block is None else block for block in found)
            if not source:
                self.cache.hold(sequence, blocks, sequence.behind)
                return True
            self.cache.host.share(source)
            # None of the half pass's blocks has a hash to be found by.
            half = self._half_pass(sequence, sequence.first_held, len(sequence.host_blocks))
            sequence.incoming = self.order(
                sequence,
                MoveKind.IN,
                source=source,
                target=target,
                blocks=blocks,
                behind=sequence.behind,
                half=half,
            )
        self._begin(sequence, Tier.TO_DEVICE)
        return True

    def _find_on_device(self, sequence: TokenSequence) -> list[BlockId | None]:
        """For each host block of the sequence, the device block with the same content, if there is one."""
        end = len(sequence.host_blocks)
        found = self.cache.pool.find_all(self.cache.held_hashes(sequence, sequence.first_held, end))
        return found + [None] * (sequence.copy_count - len(found))

    def _taken(self, found: Sequence[BlockId | None]) -> int:
        """Available device blocks that a restore takes: all but the found ones that a session holds."""
        return len(found) - sum(self.cache.pool.holders(block) > 0 for block in found if block is not None)

    def _half_pass(self, sequence: TokenSequence, first: int, end: int) -> HalfPass:
        """What of the sequence's blocks `[first, end)` only a paused pass has written to. Blocks of a group, and those
        before a state, are moved whole: the layers below the boundary are not their first ones.
        """
        paused, pool = sequence.paused_pass, self.cache.pool
        is_whole = paused is None or not paused.held or paused.boundary == self._num_layers
        if paused is None or is_whole or pool.stripe > 1 or pool.state_blocks:
            return WHOLE_PASSES
        blocks, layers = max(0, end - max(first, pool.blocks_for(sequence.computed))), max(1, paused.boundary)
        left_out = blocks * (self._num_layers - layers) * self.block_bytes // self._num_layers
        return HalfPass(blocks, layers, left_out)

    def save(self, sequence: TokenSequence) -> None:
        """Move the KV from the host to the session's file, unless the file has it already. There must be no KV of a
        half pass.
        """
        assert sequence.tier is Tier.HOST
        sequence.incoming = None  # a restore under way no longer counts
        if sequence.disk_tokens >= sequence.computed:
            self.cache.release_copies(sequence, 0)
            return
        self.set_file_size(sequence, sequence.copy_count, sequence.behind)
        sequence.disk_tokens, sequence.sent = 0, False
        self._begin(sequence, Tier.TO_DISK)
        self.cache.host.share(sequence.copies)
        sequence.saving = self.order(
            sequence,
            MoveKind.TO_DISK,
            source=tuple(sequence.copies),
            behind=sequence.behind,
            token_ids=tuple(sequence.tokens[: sequence.computed]),
            computed=sequence.computed,
            namespace=file_namespace(sequence, sequence.computed),
        )

    def load(self, sequence: TokenSequence) -> bool:
        """Read the KV from the session's file into the host. False, and nothing is changed, if there is no room."""
        assert sequence.tier is Tier.DISK
        if sequence.incoming is None:
            if self.cache.host.available < sequence.disk_blocks:
                return False
            target = tuple(self.cache.host.allocate(sequence.disk_blocks))
            sequence.incoming = self.order(sequence, MoveKind.FROM_DISK, target=target, behind=sequence.disk_behind)
        self._begin(sequence, Tier.TO_HOST)
        return True

    # Back, and away.

    def cancel_move(self, sequence: TokenSequence) -> None:
        """Give up the move that is under way, if any: the KV is back at its source at once."""
        if sequence.moving is not None:
            self.counts.turned_round += 1
            self._rest(sequence)

    def head_back(self, sequence: TokenSequence) -> None:
        """Cancel a move that leads away from the device."""
        if sequence.moving is Tier.TO_DISK or (sequence.moving is Tier.TO_HOST and sequence.blocks):
            self.cancel_move(sequence)

    def cut(self, sequence: TokenSequence, length: int) -> None:
        """Forget the KV from position `length` on, in every tier; moves under way no longer count."""
        if length < sequence.computed:
            self._uncompute(sequence, length)

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
            self._uncompute(sequence, sequence.computed)

    def drop(self, sequence: TokenSequence) -> None:
        """Lose the KV in every tier; it will be recomputed."""
        self._uncompute(sequence, 0)
        self.forget_file(sequence)

    def _uncompute(self, sequence: TokenSequence, length: int) -> None:
        self.cancel_move(sequence)
        sequence.outgoing = sequence.incoming = None
        self.cache.uncompute(sequence, length)

    # The session's file.

    def forget_file(self, sequence: TokenSequence) -> None:
        """Delete the session's file, if it has one and does not live in it."""
        if sequence.disk_blocks:
            self.set_file_size(sequence, 0, 0)
            sequence.disk_tokens = 0
            sequence.saving = None
            self.delete_file(sequence)

    def delete_file(self, sequence: TokenSequence) -> None:
        """Delete the session's file, whatever is in it."""
        self.order(sequence, MoveKind.DELETE)

    def set_file_size(self, sequence: TokenSequence, blocks: int, behind: int) -> None:
        """Note that the session's file has so many blocks: not those that lie `behind` the window."""
        self.file_blocks += blocks - sequence.disk_blocks
        sequence.disk_blocks, sequence.disk_behind = blocks, behind

    # The end of a move.

    def complete(self, report: Moved) -> tuple[Move, TokenSequence]:
        """Account for a move that has ended or failed; returns it and its sequence."""
        move, sequence = self.in_flight[report.number]
        is_of_use = self._apply_move(sequence, move, report)
        del self.in_flight[report.number]
        if move.kind is MoveKind.OUT:
            self.cache.pool.cancel_release(move.source)
        for pool, blocks in self._held_by(move):  # the sequence shares those that it wants
            pool.release(blocks)
        if not is_of_use and move.kind is MoveKind.TO_DISK:
            self.forget_file(sequence)
        elif not is_of_use:
            self.drop(sequence)
        if sequence.moving is Tier.TO_HOST and sequence.blocks:
            self._go_on_parking(sequence)
        return move, sequence

    def _apply_move(self, sequence: TokenSequence, move: Move, report: Moved) -> bool:
        """Give the sequence what it still wants of a move whose blocks are still held. False if what it has instead is
        useless: the session's file, or the KV of a move towards the device.
        """
        arrived, host = report.error is None, self.cache.host
        match move.kind:
            case MoveKind.OUT:
                self._apply_out(sequence, move, arrived=arrived)
            case MoveKind.IN if sequence.incoming is move:
                sequence.incoming = None
                if arrived:  # the blocks are offered to all, and kept if the session is still to come back
                    pool = self.cache.pool
                    pool.publish(move.blocks, self.cache.held_hashes(sequence, sequence.first_held))
                    sequence.bytes_in += len(move.source) * self.block_bytes - move.half.left_out
                    if sequence.moving is Tier.TO_DEVICE:
                        self._rest(sequence)
                        sequence.restores += 1
                        pool.share(move.blocks)
                        self.cache.hold(sequence, move.blocks, move.behind)
                return arrived
            case MoveKind.TO_DISK if sequence.saving is move:
                sequence.saving = None
                if sequence.moving is not Tier.TO_DISK:
                    return False
                self._rest(sequence)
                if arrived:
                    sequence.disk_tokens = move.computed
                    self.cache.release_copies(sequence, 0)
                return arrived
            case MoveKind.FROM_DISK if sequence.incoming is move:
                sequence.incoming = None
                if arrived and sequence.moving is Tier.TO_HOST:
                    self._rest(sequence)
                    if sequence.sent:
                        sequence.disk_tokens = 0  # the next file says whose KV it is
                    self._keep_on_host(sequence, move, move.behind)
                    self.cache.publish_copies(sequence)
                return arrived
            case MoveKind.RECEIVE if arrived and move.target and host.first_seen(report.computed) >= report.behind:
                sequence.computed = report.computed
                # It is shared with no session before it is known to be wanted.
                self._keep_on_host(sequence, move, report.behind)
            case MoveKind.RECEIVE_PROMPT:
                # What came is there for all; it is the turn's if that still waits. It may be less than was asked for.
                ends = move.first, host.blocks_for(report.computed)
                before, after = (host.groups.count_held(end, move.behind) for end in ends)
                came = move.target[: max(0, after - before)]
                host.publish(came, move.hashes)
                if came and sequence.turn is not None and sequence.turn.coming is move:
                    self.cache.extend(sequence, came, report.computed, move.first, move.behind)
        return True

    def _apply_out(self, sequence: TokenSequence, move: Move, *, arrived: bool) -> None:
        """Keep the full blocks, and the last one if nothing has been computed since the copy."""
        host, is_current = self.cache.host, sequence.outgoing is move
        if is_current:
            sequence.outgoing = None
        if not arrived:
            if is_current and sequence.moving is Tier.TO_HOST:
                self._rest(sequence)
            return
        host.publish(move.target, move.hashes)
        sequence.bytes_out += len(move.source) * self.block_bytes - move.half.left_out
        if is_current and sequence.copied >= move.first:
            unchanged = sequence.written == move.computed
            wanted = move.target if unchanged else move.target[: len(move.hashes)]
            copies = host.groups.spread(wanted, move.behind - move.first)  # more may lie behind the window by now
            copies = host.groups.held(copies, sequence.behind - move.first)
            self.cache.hold_copies(sequence, copies, sequence.behind)
            self.cache.keep_state_copy(sequence)
            sequence.fast_path_until = 0

    def _keep_on_host(self, sequence: TokenSequence, move: Move, behind: int) -> None:
        """Give the sequence the KV of its computed tokens, which has come from outside this memory, but for what lies
        `behind` the window.
        """
        host = self.cache.host
        self.cache.hash_blocks(sequence)
        count = host.groups.count_held(host.blocks_for(sequence.computed), behind)
        self.cache.hold_copies(sequence, move.target[:count], behind)


def file_namespace(sequence: TokenSequence, computed: int) -> BlockHash:
    """Namespace of a file with the KV of the first `computed` tokens: the session's own, and its interventions."""
    return sequence.namespace + sequence.interventions.fingerprint(0, computed)
