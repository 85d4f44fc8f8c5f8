"""Operations on a sequence's blocks: find a prefix, reserve room to write, publish full blocks, fork, cut, drop.

None is allowed while the sequence's KV moves: `KVTiers` takes care of that.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy

from app.domain.values import SessionId
from app.gpu.state.blocks import BlockHash, BlockId, BlockPool, chain_hash
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.paths import NO_EDITS, expected_edits
from app.gpu.state.sequence import TokenSequence


class KVCache:
    """Keeps each sequence's blocks, their host copies, `hashes` and `computed` in step with the two block pools."""

    def __init__(self, pool: BlockPool, host: BlockPool) -> None:
        self.pool = pool
        self.host = host

    def match_prefix(self, sequence: TokenSequence) -> None:
        """Give a sequence that holds no blocks the longest published prefix of its history.

        At least one token is always left to compute: the step needs its logits. Every token that a breakpoint waits
        for is left too. The prefix has been computed with the edits that the sequence would get.
        """
        size = self.pool.block_size
        edits, limit = expected_edits(sequence)
        for block_hash in self._chain(sequence, min(len(sequence.tokens) - 1, limit) // size, edits):
            block = self.pool.find(block_hash)
            if block is None:
                break
            self.pool.share([block])
            sequence.blocks.append(block)
            sequence.hashes.append(block_hash)
        sequence.computed = len(sequence.blocks) * size

    def match_host_prefix(self, sequence: TokenSequence) -> None:
        """Give a sequence without KV the longest prefix of its history that the host has, if the device has less of it:
        to copy it costs less than to compute it.
        """
        edits, limit = expected_edits(sequence)
        blocks, hashes, on_device = list[BlockId](), list[BlockHash](), 0
        for block_hash in self._chain(sequence, min(len(sequence.tokens) - 1, limit) // self.pool.block_size, edits):
            block = self.host.find(block_hash)
            if block is None:
                break
            on_device += on_device == len(blocks) and self.pool.find(block_hash) is not None
            blocks.append(block)
            hashes.append(block_hash)
        if len(blocks) > on_device:
            self.host.share(blocks)
            sequence.host_blocks, sequence.hashes = blocks, hashes
            sequence.computed = len(blocks) * self.pool.block_size
            self.accept_prefix(sequence)

    def prompt_hashes(self, sequence: TokenSequence) -> list[BlockHash]:
        """Hashes of the full blocks that come before the last token of an unwatched sequence."""
        count = (len(sequence.tokens) - 1) // self.pool.block_size
        return list(self._chain(sequence, count, NO_EDITS))

    def published(self, sequence: TokenSequence) -> int:
        """How many blocks of an unwatched sequence the device has, or the host, from the first one on."""
        hashes = self.prompt_hashes(sequence)
        return max(_leading(self.pool.find_all(hashes)), _leading(self.host.find_all(hashes)))

    def extend(self, sequence: TokenSequence, first: int, blocks: Sequence[BlockId], computed: int) -> None:
        """Put host blocks, the one that is number `first` and those behind it, in place of what the sequence has from
        there on, if that is less and the host has all before them. The KV of `computed` tokens is on the host then.
        """
        if sequence.moving is not None or len(sequence.host_blocks) < first or sequence.computed >= computed:
            return
        sequence.outgoing = sequence.incoming = None  # copies under way were of what there was before
        self.release_copies(sequence, first)
        self.release_blocks(sequence, 0)
        self.host.share(blocks)
        sequence.host_blocks.extend(blocks)
        sequence.computed = computed
        self.hash_blocks(sequence)

    def accept_prefix(self, sequence: TokenSequence) -> None:
        """Go on from the prefix that was found, and record the edits that it was computed with."""
        if sequence.watched and sequence.computed > sequence.reached:
            edits, _ = expected_edits(sequence)
            for made in edits.within(sequence.reached, sequence.computed):
                sequence.interventions.add(made)
            sequence.reached = sequence.computed

    def missing(self, sequence: TokenSequence, length: int) -> int:
        """Blocks that `reserve` of the same arguments would take from the pool."""
        copied = len(self._shared_with_others(sequence))
        return max(0, self.pool.blocks_for(sequence.computed + length) - len(sequence.blocks)) + copied

    def is_ready(self, sequence: TokenSequence) -> bool:
        """Whether the next token can be written at once: `reserve` of it would change nothing."""
        index = sequence.computed // self.pool.block_size
        return (
            index < len(sequence.blocks)
            and all(map(self.pool.is_private, sequence.blocks[index:]))
            and len(sequence.host_blocks) <= index
        )

    def reserve(self, sequence: TokenSequence, length: int) -> list[tuple[BlockId, BlockId]]:
        """Make room to write the next `length` tokens; the caller has checked that `missing` blocks are available.

        Returns block copies (source, target) to make before the step. A block that the next tokens are written to is
        copied if another sequence holds it too.
        """
        copies = []
        first = sequence.computed // self.pool.block_size
        self.release_copies(sequence, first)
        for index in self._shared_with_others(sequence):
            source = sequence.blocks[index]
            [target] = self.pool.allocate(1)
            sequence.blocks[index] = target
            self.pool.release([source])
            copies.append((source, target))
        if first < len(sequence.blocks):
            self.pool.unpublish(sequence.blocks[first])
        needed = self.pool.blocks_for(sequence.computed + length) - len(sequence.blocks)
        if needed > 0:
            sequence.blocks.extend(self.pool.allocate(needed))
        return copies

    def extend_plain(self, sequence: TokenSequence) -> bool:
        """Go on with the next block of a turn that has decoded plainly and filled its last one. False: it has to be
        looked at, or no block is available.
        """
        if not sequence.fast_path_until:
            return False
        if sequence.fast_path_until == len(sequence.blocks) * self.pool.block_size:
            if not self.pool.available:
                return False
            sequence.blocks += self.pool.allocate(1)
        sequence.fast_path_until += self.pool.block_size
        return True

    def commit(self, sequence: TokenSequence, computed: int) -> None:
        """Account for tokens that have run all layers, and publish the blocks that they filled."""
        sequence.computed = computed
        if computed > sequence.reached:
            sequence.reached = computed
        first = len(sequence.hashes)
        if computed < (first + 1) * self.pool.block_size:  # a decoded token seldom fills a block
            return
        self.hash_blocks(sequence)
        self.pool.publish(sequence.blocks[first:], sequence.hashes[first:])

    def hash_blocks(self, sequence: TokenSequence) -> None:
        """Bring `hashes` up to the full blocks of the computed tokens."""
        for index in range(len(sequence.hashes), sequence.computed // self.pool.block_size):
            parent = sequence.hashes[-1] if sequence.hashes else sequence.namespace
            sequence.hashes.append(self._hash(sequence, index, parent, sequence.interventions))

    def publish_copies(self, sequence: TokenSequence) -> None:
        """Offer the full blocks that the host has of the sequence."""
        self.host.publish(sequence.host_blocks, sequence.hashes)

    def trim(self, sequence: TokenSequence) -> None:
        """Give up blocks that were reserved for tokens which will not be computed."""
        self.release_blocks(sequence, self.pool.blocks_for(sequence.computed))

    def uncompute(self, sequence: TokenSequence, length: int) -> None:
        """Forget the KV of the tokens from position `length` on, in every tier; the history stays."""
        sequence.computed = min(sequence.computed, length)
        if sequence.checkpoint is not None:
            sequence.checkpoint.held = False
        sequence.disk_tokens = min(sequence.disk_tokens, length)
        keep = self.pool.blocks_for(sequence.computed)
        self.release_blocks(sequence, keep)
        self.release_copies(sequence, keep)
        del sequence.hashes[sequence.computed // self.pool.block_size :]

    def fork(self, sequence: TokenSequence, child: SessionId) -> TokenSequence:
        """A sequence with the same history that shares every block, the partly filled last one included."""
        self.pool.share(sequence.blocks)
        self.host.share(sequence.host_blocks)
        sequence.fast_path_until = 0
        shared = bool(sequence.blocks or sequence.host_blocks)  # a file belongs to one session
        shared_checkpoint = None if sequence.checkpoint is None else copy(sequence.checkpoint)
        if shared_checkpoint is not None and not shared:
            shared_checkpoint.held = False
        return TokenSequence(
            child,
            sequence.namespace,
            tenant=sequence.tenant,
            tokens=list(sequence.tokens),
            blocks=list(sequence.blocks),
            hashes=list(sequence.hashes) if shared else [],
            host_blocks=list(sequence.host_blocks),
            computed=sequence.computed if shared else 0,
            reached=sequence.reached,
            breakpoints=dict(sequence.breakpoints),
            interventions=sequence.interventions.copy(),
            checkpoint=shared_checkpoint,
        )

    def shrink(self, count: int, sequences: Iterable[TokenSequence]) -> list[tuple[BlockId, BlockId]] | None:
        """Give up the top `count` device blocks. `sequences` are all that hold blocks; no move holds one of these.

        Returns block copies (source, target) to make before anything else. None if too many blocks are owned.
        """
        moved = self.pool.shrink(count)
        if moved is None:
            return None
        for sequence in sequences:
            sequence.blocks = [moved.get(block, block) for block in sequence.blocks]
        return list(moved.items())

    def freed(self, sequences: Sequence[TokenSequence]) -> int:
        """Blocks that would have no holder without the sequences and the moves that copy their blocks."""
        held = Counter(block for sequence in sequences for block in sequence.blocks)
        held.update(block for each in sequences if each.outgoing is not None for block in each.outgoing.source)
        return sum(self.pool.holders(block) <= count for block, count in held.items())

    def release_blocks(self, sequence: TokenSequence, keep: int) -> None:
        """Give up the sequence's device blocks from index `keep` on."""
        if keep < len(sequence.blocks):
            sequence.fast_path_until = 0
            self.pool.release(sequence.blocks[keep:])
            del sequence.blocks[keep:]

    def release_copies(self, sequence: TokenSequence, keep: int) -> None:
        """Give up the sequence's host copies from index `keep` on."""
        if keep < len(sequence.host_blocks):
            self.host.release(sequence.host_blocks[keep:])
            del sequence.host_blocks[keep:]

    def _chain(self, sequence: TokenSequence, count: int, edits: InterventionLog) -> Iterator[BlockHash]:
        """Hashes of the first `count` blocks. A turn that waits for room asks at each step, and its history only grows,
        so it keeps them.
        """
        known = [] if edits or sequence.turn is None else sequence.turn.prefix_hashes
        for index in range(count):
            if index == len(known):
                known.append(self._hash(sequence, index, known[-1] if known else sequence.namespace, edits))
            yield known[index]

    def _hash(self, sequence: TokenSequence, index: int, parent: BlockHash, edits: InterventionLog) -> BlockHash:
        first, end = index * self.pool.block_size, (index + 1) * self.pool.block_size
        return chain_hash(parent, sequence.tokens[first:end], edits.fingerprint(first, end) if edits else b"")

    def _shared_with_others(self, sequence: TokenSequence) -> list[int]:
        """Indices of the sequence's blocks that its next tokens are written to and that others hold too."""
        first = sequence.computed // self.pool.block_size
        return [i for i in range(first, len(sequence.blocks)) if self.pool.holders(sequence.blocks[i]) > 1]


def _leading(found: Sequence[BlockId | None]) -> int:
    """How many there are before the first that is missing."""
    return found.index(None) if None in found else len(found)
