"""Operations on a sequence's blocks: find a prefix, reserve room to write, publish full blocks, fork, cut, drop.

None is allowed while the sequence's KV moves: `KVTiers` takes care of that.

Where every layer has a window (`BlockPool.window`), a sequence gives up the blocks that lie behind it, on the device
and on the host. They stay published until others need the room. A sequence that is cut to where its window's blocks are
no longer held goes on from the longest prefix that is still found, and recomputes the rest.
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
        blocks, sequence.hashes = self.find_prefix(sequence, self.pool)
        self.pool.share(blocks)
        self.hold(sequence, blocks, len(sequence.hashes) - len(blocks))
        sequence.computed = len(sequence.hashes) * self.pool.block_size

    def match_host_prefix(self, sequence: TokenSequence) -> None:
        """Give a sequence without KV the longest prefix of its history that the host has, if the device has less of it:
        to copy it costs less than to compute it.
        """
        blocks, hashes = self.find_prefix(sequence, self.host)
        if hashes and len(hashes) > len(self.find_prefix(sequence, self.pool)[1]):
            sequence.hashes, sequence.computed = hashes, len(hashes) * self.pool.block_size
            self.hold_copies(sequence, blocks, len(hashes) - len(blocks))
            self.accept_prefix(sequence)

    def finds_longer_prefix(self, sequence: TokenSequence) -> bool:
        """Whether one of the pools has a prefix of the history that is longer than what the sequence has, by a block or
        more.

        A turn that continues the last one costs one hash and one lookup, which finds nothing.
        """
        size = self.pool.block_size
        index, (edits, limit) = sequence.computed // size, expected_edits(sequence)
        if (index + 1) * size > min(len(sequence.tokens) - 1, limit) or len(sequence.hashes) < index:
            return False
        if self.pool.window is None:
            following = self._hash(sequence, index, sequence.hashes[index - 1] if index else sequence.namespace, edits)
            if self.pool.find(following) is None and self.host.find(following) is None:
                return False
        longest = max(len(self.find_prefix(sequence, pool)[1]) for pool in (self.pool, self.host))
        return (longest - 1) * size >= sequence.computed

    def find_prefix(self, sequence: TokenSequence, pool: BlockPool) -> tuple[list[BlockId], list[BlockHash]]:
        """The longest prefix of the history that `pool` has all blocks of that the next token sees: these, and the
        hashes of the whole prefix. Of a window that is its end.
        """
        edits, limit = expected_edits(sequence)
        found, hashes = list[BlockId](), list[BlockHash]()
        together = first = end = 0
        for block_hash in self._chain(sequence, min(len(sequence.tokens) - 1, limit) // pool.block_size, edits):
            block = pool.find(block_hash)
            if block is None and pool.window is None:
                break
            hashes.append(block_hash)
            found.append(-1 if block is None else block)
            together = 0 if block is None else together + 1
            seen = pool.first_seen(len(hashes) * pool.block_size)
            if together >= len(hashes) - seen:
                first, end = seen, len(hashes)
        return found[first:end], hashes[:end]

    def prompt_hashes(self, sequence: TokenSequence) -> list[BlockHash]:
        """Hashes of the full blocks that come before the last token of an unwatched sequence."""
        count = (len(sequence.tokens) - 1) // self.pool.block_size
        return list(self._chain(sequence, count, NO_EDITS))

    def extend(self, sequence: TokenSequence, first: int, blocks: Sequence[BlockId], computed: int) -> None:
        """Put host blocks, the one that is number `first` and those behind it, in place of what the sequence has from
        there on, if that is less and the host has all before them that are seen. The KV of `computed` tokens is on the
        host then.
        """
        is_whole = self.pool.first_seen(computed) >= first
        if sequence.moving is not None or sequence.computed >= computed:
            return
        if len(sequence.host_blocks) < first and not is_whole:
            return
        sequence.outgoing = sequence.incoming = None  # copies under way were of what there was before
        self.release_copies(sequence, 0 if is_whole else first)
        self.release_blocks(sequence, 0)
        sequence.computed = computed
        self.hash_blocks(sequence)
        self.hold_copies(sequence, blocks, first)

    def accept_prefix(self, sequence: TokenSequence) -> None:
        """Go on from the prefix that was found, and record the edits that it was computed with."""
        if sequence.watched and sequence.computed > sequence.reached:
            edits, _ = expected_edits(sequence)
            for made in edits.within(sequence.reached, sequence.computed):
                sequence.interventions.add(made)
            sequence.reached = sequence.computed

    def missing(self, sequence: TokenSequence, length: int) -> int:
        """Blocks that `reserve` of the same arguments would take from the pool. Of more than a step computes: most that
        the sequence would take on the way there.
        """
        return sequence.growth(self.pool, sequence.computed + length) + len(self._shared_with_others(sequence))

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
        copied if another sequence holds it too. It is also copied if it serves as a prefix and a block is free, so a
        session that returns to a history it had cut finds that prefix whole.
        """
        copies = []
        first = sequence.computed // self.pool.block_size
        needed = max(0, self.pool.blocks_for(sequence.computed + length) - len(sequence.blocks))
        self.release_copies(sequence, first)
        copied = self._shared_with_others(sequence)
        if first < len(sequence.blocks) and first not in copied and self.pool.is_published(sequence.blocks[first]):
            if self.pool.available > needed + len(copied):
                copied.append(first)
            else:
                self.pool.unpublish(sequence.blocks[first])
        for index in copied:
            source = sequence.blocks[index]
            [target] = self.pool.allocate(1)
            sequence.blocks[index] = target
            self.pool.release([source])
            copies.append((source, target))
        if needed:
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
        self.slide(sequence)

    def slide(self, sequence: TokenSequence) -> None:
        """Give up the blocks that lie behind the window of the computed tokens."""
        behind, first = sequence.behind, self.pool.first_kept(sequence.computed)
        if first <= behind:
            return
        for pool, blocks in ((self.pool, sequence.blocks), (self.host, sequence.host_blocks)):
            pool.release(blocks[behind:first])
            if len(blocks) > first:
                blocks[:first] = [blocks[first]] * first
            else:
                blocks.clear()
        sequence.behind = first if sequence.blocks or sequence.host_blocks else 0

    def hash_blocks(self, sequence: TokenSequence) -> None:
        """Bring `hashes` up to the full blocks of the computed tokens."""
        for index in range(len(sequence.hashes), sequence.computed // self.pool.block_size):
            parent = sequence.hashes[-1] if sequence.hashes else sequence.namespace
            sequence.hashes.append(self._hash(sequence, index, parent, sequence.interventions))

    def publish_copies(self, sequence: TokenSequence) -> None:
        """Offer the full blocks that the host has of the sequence."""
        self.host.publish(sequence.copies, sequence.hashes[sequence.behind :])

    def trim(self, sequence: TokenSequence) -> None:
        """Give up blocks that were reserved for tokens which will not be computed."""
        self.release_blocks(sequence, self.pool.blocks_for(sequence.computed))

    def uncompute(self, sequence: TokenSequence, length: int) -> None:
        """Forget the KV of the tokens from position `length` on, in every tier; the history stays.

        Where blocks that the next token sees are no longer held, what is left in that tier is useless: it goes too.
        """
        sequence.computed = min(sequence.computed, length)
        if sequence.checkpoint is not None:
            sequence.checkpoint.held = False
        sequence.disk_tokens = min(sequence.disk_tokens, length)
        if self.pool.first_seen(sequence.disk_tokens) < sequence.disk_behind:
            sequence.disk_tokens = 0
        keep = self.pool.blocks_for(sequence.computed)
        if self.pool.first_seen(sequence.computed) < sequence.behind:
            keep = 0
        self.release_blocks(sequence, keep)
        self.release_copies(sequence, keep)
        if not (sequence.blocks or sequence.host_blocks):
            sequence.computed = min(sequence.computed, sequence.disk_tokens)
        del sequence.hashes[sequence.computed // self.pool.block_size :]

    def fork(self, sequence: TokenSequence, child: SessionId) -> TokenSequence:
        """A sequence with the same history that shares every block, the partly filled last one included."""
        self.pool.share(sequence.held)
        self.host.share(sequence.copies)
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
            behind=sequence.behind,
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
        held = Counter(block for sequence in sequences for block in sequence.held)
        held.update(block for each in sequences if each.outgoing is not None for block in each.outgoing.source)
        return sum(self.pool.holders(block) <= count for block, count in held.items())

    def release_blocks(self, sequence: TokenSequence, keep: int) -> None:
        """Give up the sequence's device blocks from index `keep` on; all, if none before it is held."""
        if keep < len(sequence.blocks):
            sequence.fast_path_until = 0
            self._release(self.pool, sequence, sequence.blocks, keep)

    def release_copies(self, sequence: TokenSequence, keep: int) -> None:
        """Give up the sequence's host copies from index `keep` on; all, if none before it is held."""
        if keep < len(sequence.host_blocks):
            self._release(self.host, sequence, sequence.host_blocks, keep)

    def _release(self, pool: BlockPool, sequence: TokenSequence, blocks: list[BlockId], keep: int) -> None:
        pool.release(blocks[max(keep, sequence.behind) :])
        del blocks[keep if keep > sequence.behind else 0 :]
        if not (sequence.blocks or sequence.host_blocks):
            sequence.behind = 0

    def hold(self, sequence: TokenSequence, blocks: Sequence[BlockId], behind: int) -> None:
        """Give a sequence without device blocks those from index `behind` on, which it has a reference to."""
        sequence.behind = behind
        sequence.blocks = [*list(blocks[:1]) * behind, *blocks]

    def hold_copies(self, sequence: TokenSequence, blocks: Sequence[BlockId], first: int) -> None:
        """Share host blocks with a sequence, as its copies from index `first` on. If it has none yet, those before are
        behind its window.
        """
        if not blocks:
            return
        self.host.share(blocks)
        if not sequence.host_blocks:
            sequence.behind = first
            sequence.host_blocks = list(blocks[:1]) * first
        sequence.host_blocks.extend(blocks)
        self.slide(sequence)

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
