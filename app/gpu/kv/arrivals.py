"""Accounting for KV that has arrived: it counts only if the sequence still wants it."""

from app.domain.values import Tier
from app.gpu.kv.cache import KVCache
from app.gpu.state.moves import Move, MoveKind
from app.gpu.state.sequence import TokenSequence


class Arrivals:
    """Books finished moves into sequences."""

    def __init__(self, cache: KVCache, block_bytes: int) -> None:
        self._cache = cache
        self._block_bytes = block_bytes

    def book(self, sequence: TokenSequence, move: Move, *, arrived: bool, computed: int = 0) -> bool:
        """Account for the end of one move whose blocks are still held. `computed` is what another server has sent.

        False if its result is useless: the session's file, or the KV of a move towards the device.
        """
        match move.kind:
            case MoveKind.OUT:
                self._on_host(sequence, move, arrived)
            case MoveKind.IN if sequence.incoming is move:
                return self._on_device(sequence, move, arrived)
            case MoveKind.TO_DISK if sequence.saving is move:
                return self._on_disk(sequence, move, arrived)
            case MoveKind.FROM_DISK if sequence.incoming is move:
                return self._from_disk(sequence, move, arrived)
            case MoveKind.RECEIVE if arrived and move.target:
                sequence.computed = computed
                self._keep_on_host(sequence, move)  # nobody else shares it before it is known to be wanted
            case MoveKind.RECEIVE_PROMPT:
                self._behind_the_known(sequence, move, computed)
        return True

    def _on_host(self, sequence: TokenSequence, move: Move, arrived: bool) -> None:
        """Keep the full blocks, and the last one if nothing has been computed since the copy."""
        host, current = self._cache.host, sequence.outgoing is move
        if current:
            sequence.outgoing = None
        if not arrived:
            if current and sequence.moving is Tier.TO_HOST:
                sequence.moving = None
            return
        host.publish(move.target, move.hashes)
        sequence.traffic.bytes_out += len(move.source) * self._block_bytes - move.bytes_left_out
        if current and len(sequence.host_blocks) == move.first:
            unchanged = sequence.written == move.computed
            wanted = move.target if unchanged else move.target[: len(move.hashes)]
            host.share(wanted)
            sequence.host_blocks.extend(wanted)
            sequence.plain_to = 0

    def _on_device(self, sequence: TokenSequence, move: Move, arrived: bool) -> bool:
        sequence.incoming = None
        if not arrived:
            return False
        pool = self._cache.pool
        pool.publish(move.blocks, sequence.hashes)
        sequence.traffic.bytes_in += len(move.source) * self._block_bytes - move.bytes_left_out
        if sequence.moving is Tier.TO_DEVICE:
            sequence.moving = None
            sequence.traffic.restores += 1
            pool.share(move.blocks)
            sequence.blocks = list(move.blocks)
        return True

    def _on_disk(self, sequence: TokenSequence, move: Move, arrived: bool) -> bool:
        sequence.saving = None
        if sequence.moving is not Tier.TO_DISK:
            return False
        sequence.moving = None
        if arrived:
            sequence.disk_tokens = move.computed
            self._cache.release_copies(sequence, 0)
        return arrived

    def _from_disk(self, sequence: TokenSequence, move: Move, arrived: bool) -> bool:
        sequence.incoming = None
        if arrived and sequence.moving is Tier.TO_HOST:
            sequence.moving = None
            if sequence.sent:
                sequence.disk_tokens = 0  # the next file says whose KV it is
            self._keep_on_host(sequence, move)
            self._cache.publish_copies(sequence)
        return arrived

    def _behind_the_known(self, sequence: TokenSequence, move: Move, computed: int) -> None:
        """Offer a prompt's blocks to all on the host, and give them to the turn that waits for them, if it still does.
        They may be fewer than were asked for.
        """
        host, turn = self._cache.host, sequence.turn
        came = move.target[: max(0, host.blocks_for(computed) - move.first)]
        host.publish(came, move.hashes)
        if came and turn is not None and turn.coming is move:
            self._cache.extend(sequence, move.first, came, computed)

    def _keep_on_host(self, sequence: TokenSequence, move: Move) -> None:
        """Give the sequence the KV of its computed tokens, which has come from outside this memory."""
        host = self._cache.host
        self._cache.hash_blocks(sequence)
        kept = move.target[: host.blocks_for(sequence.computed)]
        host.share(kept)
        sequence.host_blocks = list(kept)
