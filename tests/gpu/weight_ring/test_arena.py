"""Where KV, kept bundles and the ring lie: nothing overlaps, wherever the boundary is."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from app.gpu.weight_files.alignment import ALIGNMENT
from app.gpu.weight_ring.arena import lay_out
from app.gpu.weight_ring.residency import WeightPlan, plan_weights

plans = st.builds(
    lambda units, room: plan_weights([size * ALIGNMENT for size in units], (2 * max(units) + room) * ALIGNMENT),
    st.lists(st.integers(1, 200), min_size=1, max_size=30),
    st.integers(0, 3000),
)


@given(plan=plans, kv_blocks=st.integers(1, 50), block_bytes=st.integers(1, 9000))
def test_everything_has_a_place_of_its_own(plan: WeightPlan, kv_blocks: int, block_bytes: int) -> None:
    arena = lay_out(plan, kv_blocks, block_bytes)
    assert arena.places.keys() == plan.kept
    for index, place in arena.places.items():
        assert place.end - place.start == plan.sizes[index]
        assert place.start % ALIGNMENT == 0
    ends = [(0, kv_blocks * block_bytes), *((place.start, place.end) for place in arena.places.values())]
    ends.append((arena.ring.start, arena.ring.end))
    assert all(before[1] <= after[0] for before, after in pairwise(ends))
    assert arena.ring.end - arena.ring.start == plan.ring_bytes
    assert arena.nbytes < kv_blocks * block_bytes + plan.device_bytes + ALIGNMENT


@given(plan=plans, kv_blocks=st.integers(1, 50), block_bytes=st.integers(1, 9000))
def test_kv_takes_all_of_what_is_lent_and_nothing_else(plan: WeightPlan, kv_blocks: int, block_bytes: int) -> None:
    arena = lay_out(plan, kv_blocks, block_bytes)
    assert arena.blocks(0) == kv_blocks
    others = [place.start for index, place in arena.places.items() if index not in arena.lendable]
    bottoms = [*(arena.places[index].start for index in arena.lendable), min([*others, arena.ring.start])]
    for lent in range(1, len(arena.lendable) + 1):
        left_over = bottoms[lent] - arena.blocks(lent) * block_bytes
        assert 0 <= left_over < block_bytes
    assert arena.most_blocks == arena.blocks(len(arena.lendable))


def test_only_large_bundles_are_lent_and_none_that_could_not_be_streamed() -> None:
    layer, norm = 1000 * ALIGNMENT, ALIGNMENT
    streamed = lay_out(plan_weights([layer] * 6 + [norm], 4 * layer + norm), 4, 512)
    assert len(streamed.lendable) == 2
    assert 6 in streamed.places
    assert 6 not in streamed.lendable
    resident = lay_out(plan_weights([layer] * 6 + [norm], 7 * layer), 4, 512)
    assert resident.lendable == ()
    assert resident.most_blocks == 4


@given(kept=st.integers(1, 40))
def test_what_is_not_lent_is_spread_over_the_pass(kept: int) -> None:
    size = ALIGNMENT
    plan = plan_weights([size] * 80, (2 + kept) * size)
    lendable = lay_out(plan, 1, 512).lendable
    for lent in range(kept):
        ends = [-1, *sorted(lendable[lent:]), 80]
        longest = max(after - before for before, after in pairwise(ends))
        assert longest <= 4 * 80 / (kept - lent + 1) + 2, "nearly all that stay are in one part of the pass"
