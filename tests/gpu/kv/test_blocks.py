"""Blocks that come and go at the top of a pool: what is held and what is published stays, and is found where it is."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.gpu.state.blocks import BlockId, BlockPool, chain_hash

BLOCK_SIZE = 4


class ElasticPoolMachine(RuleBasedStateMachine):
    """Holders write a number of their own into each block; `memory` is what the blocks contain."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, BLOCK_SIZE)
        self.memory: dict[BlockId, int] = {}
        self.held: list[tuple[list[BlockId], list[int]]] = []
        """Blocks and what their holder expects in them."""
        self.leaving: list[list[BlockId]] = []
        """Those of `held` whose holders are about to release them."""
        self.written = 0

    def hash_of(self, content: int) -> bytes:
        return content.to_bytes(4)

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        """Before anything is evicted the lowest free blocks are taken."""
        count = min(count, self.pool.available)
        in_use = {block for blocks, _ in self.held for block in blocks}
        unused = [block for block in range(self.pool.num_blocks) if block not in in_use]
        free = [block for block in unused if self.pool.find(self.hash_of(self.memory.get(block, 0))) != block]
        blocks = self.pool.allocate(count)
        assert blocks[: len(free)] == free[:count]
        contents = list(range(self.written + 1, self.written + count + 1))
        self.written += count
        self.memory.update(zip(blocks, contents, strict=True))
        self.held.append((blocks, contents))

    @precondition(lambda self: self.held)
    @rule(choice=st.floats(0, 0.999))
    def publish(self, choice: float) -> None:
        for block, content in zip(*self.held[int(choice * len(self.held))], strict=True):
            self.pool.publish([block], [self.hash_of(content)])

    @precondition(lambda self: self.written)
    @rule(choice=st.floats(0, 0.999))
    def share_what_is_found(self, choice: float) -> None:
        content = 1 + int(choice * self.written)
        block = self.pool.find(self.hash_of(content))
        if block is not None:
            self.pool.share([block])
            self.held.append(([block], [content]))

    @precondition(lambda self: self.held)
    @rule(choice=st.floats(0, 0.999))
    def release(self, choice: float) -> None:
        blocks, _ = self.held.pop(int(choice * len(self.held)))
        self.stay(blocks)
        self.pool.release(blocks)

    @precondition(lambda self: self.held)
    @rule(choice=st.floats(0, 0.999))
    def leave_or_stay(self, choice: float) -> None:
        blocks, _ = self.held[int(choice * len(self.held))]
        if not self.stay(blocks):
            self.pool.expect_release(blocks)
            self.leaving.append(blocks)

    def stay(self, blocks: list[BlockId]) -> bool:
        before = len(self.leaving)
        self.leaving = [each for each in self.leaving if each is not blocks]
        if len(self.leaving) < before:
            self.pool.cancel_release(blocks)
        return len(self.leaving) < before

    @rule(count=st.integers(0, 5))
    def grow(self, count: int) -> None:
        size, available = self.pool.num_blocks, self.pool.available
        self.pool.grow(count)
        assert (self.pool.num_blocks, self.pool.available) == (size + count, available + count)

    @rule(share=st.floats(0, 1))
    def shrink(self, share: float) -> None:
        """It goes as far as there is room for what is owned, and no further."""
        size, owned = self.pool.num_blocks, self.pool.owned
        count = round(share * size)
        moved = self.pool.shrink(count)
        assert (moved is None) == (owned > size - count)
        if moved is None:
            assert self.pool.num_blocks == size
            return
        assert (self.pool.num_blocks, self.pool.owned) == (size - count, owned)
        for source, target in moved.items():
            assert target < size - count <= source
            self.memory[target] = self.memory[source]
        self.memory = {block: content for block, content in self.memory.items() if block < size - count}
        for blocks, _ in self.held:
            blocks[:] = [moved.get(block, block) for block in blocks]

    @invariant()
    def holders_find_what_they_wrote(self) -> None:
        self.pool.check_integrity([blocks for blocks, _ in self.held])
        for blocks, contents in self.held:
            assert [self.memory[block] for block in blocks] == contents

    @invariant()
    def blocks_leave_when_all_their_holders_do(self) -> None:
        holders = Counter(block for blocks, _ in self.held for block in blocks)
        leaving = Counter(block for blocks in self.leaving for block in blocks)
        assert self.pool.leaving == sum(count == leaving[block] for block, count in holders.items())

    @invariant()
    def what_is_published_is_what_it_says(self) -> None:
        for content in range(1, self.written + 1):
            block = self.pool.find(self.hash_of(content))
            assert block is None or self.memory[block] == content


TestElasticPool = ElasticPoolMachine.TestCase
TestElasticPool.settings = settings(stateful_step_count=50)


def test_free_blocks_make_way_before_prefixes_do() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    prefix, gap, free, top = pool.allocate(4)
    pool.publish([prefix], [b"prefix"])
    pool.publish([top], [b"top"])
    pool.release([prefix])
    pool.release([gap, free])
    assert pool.shrink(1) == {top: gap}
    assert pool.find(b"prefix") == prefix
    assert pool.find(b"top") == gap
    assert pool.holders(gap) == 1


@given(tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=64), data=st.data())
def test_blocks_that_differ_in_anything_have_other_hashes(tokens: list[int], data: st.DataObject) -> None:
    """Or a session would read the KV of other tokens, edits or tenants."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    hashes = [
        chain_hash(b"tenant", tokens),
        chain_hash(b"tenant", changed),
        chain_hash(b"another", tokens),
        chain_hash(b"tenant", tokens, b"edit"),
    ]
    assert len(set(hashes)) == 4
    assert hashes[0] == chain_hash(b"tenant", tuple(tokens))
