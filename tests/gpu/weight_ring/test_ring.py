"""How memory is shared between KV, bundles that stay and a ring: judged by the limits, by what a pass would cost, and
by where everything lies. That no place is written to while it is read shows in test_streamed.py.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from weakref import WeakSet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.errors import FieldOutOfRange
from app.gpu.weight_files.alignment import ALIGNMENT
from app.gpu.weight_ring.arena import lay_out
from app.gpu.weight_ring.residency import WeightPlan, plan_weights
from app.gpu.weight_ring.ring import Place, Ring

UNIT = 256
LAYER = 1000 * UNIT
NORM = 2 * UNIT

sizes_of_bundles = st.lists(st.integers(1, 200).map(lambda units: units * UNIT), min_size=1, max_size=40)


def streamed_of(plan: WeightPlan) -> tuple[int, ...]:
    """Bundles that are not kept, in the order of use."""
    return tuple(index for index in range(len(plan.sizes)) if index not in plan.kept)


@given(sizes=sizes_of_bundles, share=st.floats(0, 1.5), from_disk=st.booleans())
def test_the_budget_holds_and_is_used_up_to_a_bundle(sizes: list[int], share: float, from_disk: bool) -> None:
    budget = int(share * sum(sizes))
    if budget < min(sum(sizes), 2 * max(sizes)):
        with pytest.raises(FieldOutOfRange):
            plan_weights(sizes, budget, from_disk=from_disk)
        return
    plan = plan_weights(sizes, budget, from_disk=from_disk)
    assert plan.device_bytes <= budget
    streamed = streamed_of(plan)
    assert plan.kept <= set(range(len(sizes)))
    assert plan.kept_bytes + plan.streamed_bytes == sum(sizes)
    if streamed:
        assert plan.ring_bytes >= 2 * max(sizes[index] for index in streamed)
        assert budget - plan.device_bytes < max(sizes)
    else:
        assert plan.ring_bytes == 0


@given(layers=st.integers(3, 60), kept=st.integers(0, 57))
def test_layers_that_stay_are_spread_evenly(layers: int, kept: int) -> None:
    kept = min(kept, layers - 3)
    plan = plan_weights([LAYER] * layers, (2 + kept) * LAYER)
    assert len(plan.kept) == kept
    streamed = streamed_of(plan)
    ends = [-1, *streamed, layers]
    runs = [after - before - 1 for before, after in pairwise(ends)]
    assert max(runs) <= -(-kept // len(streamed)), "so many kept ones in a row that the copies would stand still"
    if kept:
        streams = [after - before - 1 for before, after in pairwise([-1, *sorted(plan.kept)])]
        assert max(streams) <= -(-len(streamed) // kept)
    from_disk = plan_weights([LAYER] * layers + [NORM], (2 + kept) * LAYER + NORM, from_disk=True)
    assert streamed_of(from_disk) == tuple(range(kept, layers)), "a disk is read from first to last"


def test_a_norm_stays_before_any_layer_does() -> None:
    sizes = [LAYER] * 10 + [NORM] + [LAYER // 2] * 4
    assert plan_weights(sizes, 2 * LAYER).kept == frozenset()
    assert plan_weights(sizes, 2 * LAYER + NORM).kept == {10}
    assert 10 in plan_weights(sizes, 5 * LAYER).kept


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        (2 * LAYER - 1, "511999 bytes"),
        (LAYER - 1, "largest bundle of 256000 bytes"),
        (0, "streaming needs 512000 bytes"),
        (2 * LAYER - UNIT, r"keeping all weights on the device 1280000 bytes \(1\.2 MiB\)"),
    ],
)
def test_a_ring_that_does_not_fit_is_refused_with_the_sizes(budget: int, named: str) -> None:
    with pytest.raises(FieldOutOfRange, match=named) as refused:
        plan_weights([LAYER] * 5, budget)
    assert refused.value.param == "weights_device"


plans = st.builds(
    lambda units, room: plan_weights([size * ALIGNMENT for size in units], (2 * max(units) + room) * ALIGNMENT),
    st.lists(st.integers(1, 200), min_size=1, max_size=30),
    st.integers(0, 3000),
)


@given(plan=plans, kv_blocks=st.integers(1, 50), block_bytes=st.integers(1, 9000))
def test_everything_has_a_place_and_kv_takes_all_of_what_is_lent_and_nothing_else(
    plan: WeightPlan, kv_blocks: int, block_bytes: int
) -> None:
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


@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=12), more=st.integers(0, 24), laps=st.integers(1, 4))
def test_a_reader_that_holds_one_bundle_is_never_stuck(sizes: list[int], more: int, laps: int) -> None:
    ring: Ring[int] = Ring(max(sizes) + more)
    ahead: deque[Place] = deque()
    loaded = 0
    for step in range(laps * len(sizes)):
        while (room := ring.reserve(sizes[loaded % len(sizes)])) is not None:
            ahead.append(room[0])
            loaded += 1
        place = ahead.popleft()
        assert place.end - place.start == sizes[step % len(sizes)]
        ring.release(place, step)


@given(size=st.integers(1, 8), more=st.integers(0, 20), uses=st.integers(2, 40))
def test_with_room_for_two_of_its_bundles_the_next_one_is_always_on_its_way(size: int, more: int, uses: int) -> None:
    ring: Ring[int] = Ring(2 * size + more)
    now = ring.reserve(size)
    for use in range(uses):
        assert now is not None
        following = ring.reserve(size)
        assert following is not None, "the copy stream would wait for the bundle in use"
        ring.release(now[0], use)
        now = following


class Guard:
    """Something that can be watched for being kept."""


def test_guards_of_reused_places_are_not_kept() -> None:
    ring: Ring[Guard] = Ring(10)
    alive: WeakSet[Guard] = WeakSet()
    for size in [3, 4, 2, 5, 1] * 200:
        room = ring.reserve(size)
        assert room is not None
        guard = Guard()
        alive.add(guard)
        ring.release(room[0], guard)
        assert len(alive) <= ring.size + len(room[1])


def test_what_the_ring_can_never_hold_or_is_not_in_use_is_refused() -> None:
    ring: Ring[str] = Ring(1024)
    for size in (-256, 0, 1025):
        with pytest.raises(ValueError, match=rf"{size} bytes asked of a ring of 1024 bytes"):
            ring.reserve(size)
    room = ring.reserve(256)
    assert room is not None
    ring.release(room[0], "used")
    with pytest.raises(RuntimeError, match="not in use"):
        ring.release(room[0], "again")
