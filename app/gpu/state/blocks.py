"""Book-keeping of one tier's KV blocks: who holds them, which are free, which hold a prefix that others can reuse.

A block is in exactly one of three places:

    free    no session holds it and its content means nothing
    owned   one or more sequences hold it (reference count above 0)
    cached  no session holds it, but its content is a published prefix: first in, first evicted

Blocks come and go at the top, so free ones are given out from the bottom.

A layer with a window needs its last tokens only. So a model's layers are divided into groups: all layers of a group
have a window, or none has. A block has the KV of one group for `block_size` tokens. The blocks of the same tokens, one
of each group, are a stripe: those without a window come first. A sequence has one stripe after the other, and gives up
blocks with a window once they lie behind it. All models but those with both kinds of layers have one group.

Layers that fold keep a state for each sequence, not for each token. It takes the last of a sequence's blocks, behind
those of its tokens, and is true of exactly its computed tokens. Of a model that keeps nothing for each token, the first
of these is also the one block of all tokens.
"""

import hashlib
import heapq
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from app.domain.memory_map import BlockCounts
from app.gpu.state.layer_state import ONE_GROUP, Groups

BlockId = int
BlockHash = bytes


def chain_hash(parent: BlockHash, token_ids: Sequence[int], fingerprint: bytes = b"") -> BlockHash:
    """Identity of a full stripe: its tokens, the `fingerprint` of the interventions that it was computed with (none:
    empty), and everything before it.

    The first block's parent is the sequence's namespace, so equal tokens of different tenants have different hashes.
    128 bits of BLAKE2b: no client can craft two prompts that share a block.
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes() + fingerprint, digest_size=16).digest()


class BlockPool:
    """Reference counts, free list and prefix index over `num_blocks` blocks of `block_size` tokens."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        window: int | None = None,
        step_tokens: int = sys.maxsize,
        state_blocks: int = 0,
        extra_blocks: int = 0,
        groups: Groups | None = None,
    ) -> None:
        """In groups with a window no token sees more than the last `window`, itself included. `groups` is None: there
        is one, with a window if that is given. A step computes at most `step_tokens` of one sequence. The last
        `state_blocks` of a sequence's blocks have the state of its folding layers; `extra_blocks` of these are not
        counted by its tokens.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.state_blocks = state_blocks
        self.extra_blocks = extra_blocks
        self.groups = groups or (ONE_GROUP if window is None else Groups(0, 1))
        self.stripe = self.groups.size
        """Blocks of the same tokens."""
        self._window = window or 0
        self._tags = [bytes([group]) for group in range(self.stripe)]
        kept = 0 if window is None else -(-window // block_size) + 1
        self.counts = BlockCounts(block_size, *self.groups, most=kept, state=extra_blocks)
        """Most that a sequence holds between two steps."""
        self._counts_in_step = replace(self.counts, most=kept + -(-step_tokens // block_size))
        self.changes = 0
        """How often blocks have got or lost holders."""
        self.leaving = 0
        """Owned blocks that become available once every release that is expected has come."""
        self._leaving: dict[BlockId, int] = {}
        """How many holders of a block are expected to release it; others have no entry."""
        self._refs = [0] * num_blocks
        self._free: list[BlockId] = list(range(num_blocks))
        """A heap: the lowest is taken first."""
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._by_hash: dict[BlockHash, BlockId] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: the free ones, then the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Unreferenced blocks that still serve as a prefix."""
        return len(self._cached)

    @property
    def owned(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a history of `tokens` tokens and its state, whether a sequence still holds them or not."""
        return -(-tokens // self.block_size) * self.stripe + self.extra_blocks if tokens else 0

    def kept_for(self, tokens: int) -> int:
        """Most blocks that a sequence holds between two steps, once `tokens` tokens are computed."""
        return self.counts.of(tokens) if self._window else self.blocks_for(tokens)

    def most_for(self, tokens: int) -> int:
        """Most blocks that a sequence holds on its way to `tokens` computed tokens."""
        return self._counts_in_step.of(tokens) if self._window else self.blocks_for(tokens)

    def longest(self, limit: int) -> int:
        """The most tokens, up to `limit`, that a sequence can come to with the whole pool."""
        if self.most_for(limit) <= self.num_blocks:
            return limit
        room, most = self.num_blocks - self.extra_blocks, self._counts_in_step.most
        full, windowed = self.groups
        stripes = (room - windowed * most) // full if room > self.stripe * most else room // self.stripe
        return stripes * self.block_size

    def place_of(self, position: int) -> int:
        """Index of the first block of the stripe with the token at `position`."""
        return position // self.block_size * self.stripe

    def first_kept(self, tokens: int) -> int:
        """How many of a sequence's first blocks lie behind the window, once `tokens` tokens are computed."""
        if not self._window:
            return 0
        return max(0, tokens // self.block_size - -(-self._window // self.block_size)) * self.stripe

    def first_seen(self, position: int) -> int:
        """How many of a sequence's first blocks lie behind the window of a token at `position`. It counts as seeing the
        token before it.
        """
        if not self._window:
            return 0
        return max(0, position + 1 - max(2, self._window)) // self.block_size * self.stripe

    def parts_of(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """The hashes of all blocks of stripes, given those of their tokens."""
        if self.stripe == 1:
            return list(hashes)
        return [block_hash + tag for block_hash in hashes for tag in self._tags]

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks with reference count 1. Raises RuntimeError if `available` is less."""
        if count > self.available:
            raise RuntimeError(f"{count} blocks asked, {self.available} available")
        self.changes += 1
        taken = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        evicted = list(islice(self._cached, count - len(taken)))
        for block in evicted:  # each is published, and a restore evicts many: `unpublish` without a call for each
            del self._cached[block], self._by_hash[self._hash_of.pop(block)]
        taken += evicted
        for block in taken:
            self._refs[block] = 1
        return taken

    def grow(self, count: int) -> None:
        """Add `count` free blocks at the top."""
        added = range(self.num_blocks, self.num_blocks + count)
        self._refs.extend([0] * count)
        self._free.extend(added)  # above all others, and ascending: it is still a heap
        self.num_blocks += count

    def shrink(self, count: int) -> dict[BlockId, BlockId]:
        """Give up the top `count` blocks: cached ones are evicted, owned ones move further down. No move holds one of
        these. Raises RuntimeError if `available` is less.

        Returns where each owned block moves to: before anything else is done with the pool its content must be copied,
        and all of its holders hold the other.
        """
        end = self.num_blocks - count
        if self.owned > end:
            raise RuntimeError(f"{count} blocks are to go, {self.available} available")
        owned = []
        for block in range(end, self.num_blocks):
            if self._refs[block] > 0:
                owned.append(block)
            elif block in self._cached:
                del self._cached[block]
                self.unpublish(block)
        self._free = [block for block in self._free if block < end]
        heapq.heapify(self._free)
        moved = {block: self._take_over(block) for block in owned}
        del self._refs[end:]
        self.num_blocks = end
        return moved

    def share(self, blocks: Sequence[BlockId]) -> None:
        """Add one holder to each block; a cached block becomes owned again."""
        self.changes += 1
        refs = self._refs
        if self._leaving:
            self.leaving -= self._count_leaving(blocks)
        for block in blocks:
            if refs[block] == 0:
                del self._cached[block]
            refs[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one holder of each block. The last blocks of a sequence become evictable first, prefixes last."""
        self.changes += 1
        refs, freed = self._refs, list[BlockId]()
        try:
            for block in reversed(blocks):
                left = refs[block] - 1
                if left < 0:
                    raise RuntimeError(f"block {block} is released, but has no reference")
                refs[block] = left
                if left == 0 and block in self._hash_of:
                    self._cached[block] = None
                elif left == 0:
                    freed.append(block)
        finally:
            for block in reversed(freed):  # mostly ascending: few have to rise in the heap
                heapq.heappush(self._free, block)
        if self._leaving:
            self.leaving += self._count_leaving(blocks)

    def expect_release(self, blocks: Iterable[BlockId]) -> None:
        """Count one holder of each block as about to release it; `cancel_release` comes before the release."""
        for block in blocks:
            self._leaving[block] = count = self._leaving.get(block, 0) + 1
            self.leaving += count == self._refs[block]

    def cancel_release(self, blocks: Iterable[BlockId]) -> None:
        """Count one holder of each block as staying again."""
        for block in blocks:
            count = self._leaving.pop(block)
            self.leaving -= count == self._refs[block]
            if count > 1:
                self._leaving[block] = count - 1

    def publish(self, blocks: Iterable[BlockId], hashes: Iterable[BlockHash]) -> None:
        """Offer full, owned blocks as a prefix, each under its hash; what has no counterpart is left out. The first
        block published under a hash serves it.
        """
        by_hash, hash_of = self._by_hash, self._hash_of
        for block, block_hash in zip(blocks, hashes, strict=False):
            if block_hash not in by_hash:
                by_hash[block_hash] = block
                hash_of[block] = block_hash

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """The block that holds this prefix, if there is one."""
        return self._by_hash.get(block_hash)

    def has(self, block_hash: BlockHash) -> bool:
        """Whether there is one."""
        return block_hash in self._by_hash

    def find_all(self, hashes: Iterable[BlockHash]) -> list[BlockId | None]:
        """`find` for each."""
        return list(map(self._by_hash.get, hashes))

    def holders(self, block: BlockId) -> int:
        """How many hold the block."""
        return self._refs[block]

    def is_private(self, block: BlockId) -> bool:
        """Whether the block has a single holder, and is not found by its content."""
        return self._refs[block] == 1 and block not in self._hash_of

    def is_published(self, block: BlockId) -> bool:
        """Whether the block is found by its content."""
        return block in self._hash_of

    def unpublish(self, block: BlockId) -> None:
        """Withdraw a block from the prefix index, because its holder is about to write to it again."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._by_hash[block_hash]

    def check_integrity(self, holders: Iterable[Sequence[BlockId]]) -> None:
        """Raise RuntimeError unless free + owned + cached is the pool and `holders` account for every reference."""
        counted = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                counted[block] += 1
        if counted != self._refs:
            wrong = [block for block in range(self.num_blocks) if counted[block] != self._refs[block]]
            raise RuntimeError(f"reference counts differ from the holders at blocks {wrong}")
        unowned = sorted([*self._free, *self._cached])
        if unowned != [block for block in range(self.num_blocks) if self._refs[block] == 0]:
            raise RuntimeError("free and cached blocks are not exactly the unreferenced blocks")
        if {block: block_hash for block_hash, block in self._by_hash.items()} != self._hash_of:
            raise RuntimeError("the prefix index and its reverse differ")
        if self.leaving != self._count_leaving(self._leaving):
            raise RuntimeError("the count of blocks that all holders are about to release is wrong")
        if not self._cached.keys() <= self._hash_of.keys() or not self._hash_of.keys().isdisjoint(self._free):
            raise RuntimeError("a cached block is not published, or a free one is")

    def _count_leaving(self, blocks: Iterable[BlockId]) -> int:
        """How many of the blocks all holders are expected to release."""
        return sum(self._leaving.get(block) == self._refs[block] for block in blocks)

    def _take_over(self, source: BlockId) -> BlockId:
        """Take a block that has the holders and the prefix of `source` from now on."""
        [target] = self.allocate(1)
        self._refs[target] = self._refs[source]
        if source in self._leaving:
            self._leaving[target] = self._leaving.pop(source)
        if source in self._hash_of:
            self._hash_of[target] = self._hash_of.pop(source)
            self._by_hash[self._hash_of[target]] = target
        return target
