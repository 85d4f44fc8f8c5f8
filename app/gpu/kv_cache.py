"""What a sequence does with its blocks: find a prefix, reserve room to write, publish what is full, fork, cut, drop.

Nothing here may be done to a sequence whose KV is moving: `KVTiers` sees to that.
"""

from __future__ import annotations

from app.domain import SessionId
from app.gpu.kv_blocks import BlockId, BlockPool, chain_hash
from app.gpu.sequence import Sequence


class KVCache:
    """Keeps each sequence's blocks, their host copies, `hashes` and `computed` in step with the two block pools."""

    def __init__(self, pool: BlockPool, host: BlockPool) -> None:
        self.pool = pool
        self.host = host

    def match_prefix(self, sequence: Sequence) -> None:
        """Give a sequence that holds no blocks the longest published prefix of its history.

        At least one token is always left to compute: the step needs its logits.
        """
        size = self.pool.block_size
        parent = sequence.namespace
        for index in range((len(sequence.tokens) - 1) // size):
            parent = chain_hash(parent, sequence.tokens[index * size : (index + 1) * size])
            block = self.pool.find(parent)
            if block is None:
                break
            self.pool.share([block])
            sequence.blocks.append(block)
            sequence.hashes.append(parent)
        sequence.computed = len(sequence.blocks) * size

    def missing(self, sequence: Sequence, length: int) -> int:
        """Blocks that `reserve` of the same arguments would take from the pool."""
        copied = self._writes_into_shared(sequence)
        return max(0, self.pool.blocks_for(sequence.computed + length) - len(sequence.blocks)) + copied

    def reserve(self, sequence: Sequence, length: int) -> list[tuple[BlockId, BlockId]]:
        """Make room to write the next `length` tokens; the caller has checked that `missing` blocks are available.

        Returns block copies (source, target) to make before the step: a partly filled block that another sequence also
        holds is copied on write.
        """
        copies = []
        index = sequence.computed // self.pool.block_size
        self.release_copies(sequence, index)
        if self._writes_into_shared(sequence):
            source = sequence.blocks[index]
            [target] = self.pool.allocate(1)
            sequence.blocks[index] = target
            self.pool.release([source])
            copies.append((source, target))
        elif index < len(sequence.blocks):
            self.pool.unpublish(sequence.blocks[index])
        needed = self.pool.blocks_for(sequence.computed + length) - len(sequence.blocks)
        if needed > 0:
            sequence.blocks.extend(self.pool.allocate(needed))
        return copies

    def commit(self, sequence: Sequence, computed: int) -> None:
        """Account for tokens that have run all layers, and publish the blocks that they filled."""
        sequence.computed = computed
        sequence.reached = max(sequence.reached, computed)
        first = len(sequence.hashes)
        self.hash_blocks(sequence)
        for block, block_hash in zip(sequence.blocks[first:], sequence.hashes[first:], strict=False):
            self.pool.publish(block, block_hash)

    def hash_blocks(self, sequence: Sequence) -> None:
        """Bring `hashes` up to the full blocks of the computed tokens."""
        size = self.pool.block_size
        for index in range(len(sequence.hashes), sequence.computed // size):
            parent = sequence.hashes[-1] if sequence.hashes else sequence.namespace
            sequence.hashes.append(chain_hash(parent, sequence.tokens[index * size : (index + 1) * size]))

    def uncompute(self, sequence: Sequence, length: int) -> None:
        """Forget the KV of the tokens from position `length` on, in every tier; the history stays."""
        sequence.computed = min(sequence.computed, length)
        sequence.disk_tokens = min(sequence.disk_tokens, length)
        keep = self.pool.blocks_for(sequence.computed)
        self.release_blocks(sequence, keep)
        self.release_copies(sequence, keep)
        del sequence.hashes[sequence.computed // self.pool.block_size :]

    def fork(self, sequence: Sequence, child: SessionId) -> Sequence:
        """A sequence with the same history that shares every block, the partly filled last one included."""
        self.pool.share(sequence.blocks)
        self.host.share(sequence.host_blocks)
        shared = bool(sequence.blocks or sequence.host_blocks)  # a file belongs to one session
        return Sequence(
            child,
            sequence.namespace,
            tokens=list(sequence.tokens),
            blocks=list(sequence.blocks),
            hashes=list(sequence.hashes) if shared else [],
            host_blocks=list(sequence.host_blocks),
            computed=sequence.computed if shared else 0,
            reached=sequence.reached,
        )

    def release_blocks(self, sequence: Sequence, keep: int) -> None:
        """Give up the sequence's device blocks from index `keep` on."""
        self.pool.release(sequence.blocks[keep:])
        del sequence.blocks[keep:]

    def release_copies(self, sequence: Sequence, keep: int) -> None:
        """Give up the sequence's host copies from index `keep` on."""
        self.host.release(sequence.host_blocks[keep:])
        del sequence.host_blocks[keep:]

    def _writes_into_shared(self, sequence: Sequence) -> bool:
        index = sequence.computed // self.pool.block_size
        return index < len(sequence.blocks) and self.pool.holders(sequence.blocks[index]) > 1
