"""What a sequence does with its blocks: find a prefix, reserve room to write, publish what is full, fork, cut, drop."""

from __future__ import annotations

from app.domain import SessionId
from app.gpu.kv_blocks import BlockHash, BlockId, BlockPool, chain_hash
from app.gpu.sequence import Sequence


class KVCache:
    """Keeps each sequence's `blocks`, `hashes` and `computed` in step with the block pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

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
        size = self.pool.block_size
        for index in range(len(sequence.hashes), computed // size):
            block_hash = chain_hash(_parent(sequence), sequence.tokens[index * size : (index + 1) * size])
            sequence.hashes.append(block_hash)
            self.pool.publish(sequence.blocks[index], block_hash)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Cut the history to `length` tokens and release the blocks past it."""
        del sequence.tokens[length:]
        sequence.reached = min(sequence.reached, length)
        self.uncompute(sequence, length)

    def uncompute(self, sequence: Sequence, length: int) -> None:
        """Forget the KV of the tokens from position `length` on; the history stays."""
        sequence.computed = min(sequence.computed, length)
        keep = self.pool.blocks_for(sequence.computed)
        self.pool.release(sequence.blocks[keep:])
        del sequence.blocks[keep:]
        del sequence.hashes[sequence.computed // self.pool.block_size :]

    def fork(self, sequence: Sequence, child: SessionId) -> Sequence:
        """A sequence with the same history that shares every block, the partly filled last one included."""
        self.pool.share(sequence.blocks)
        return Sequence(
            child,
            sequence.namespace,
            tokens=list(sequence.tokens),
            blocks=list(sequence.blocks),
            hashes=list(sequence.hashes),
            computed=sequence.computed,
            reached=sequence.reached,
        )

    def _writes_into_shared(self, sequence: Sequence) -> bool:
        index = sequence.computed // self.pool.block_size
        return index < len(sequence.blocks) and self.pool.is_shared(sequence.blocks[index])


def _parent(sequence: Sequence) -> BlockHash:
    return sequence.hashes[-1] if sequence.hashes else sequence.namespace
