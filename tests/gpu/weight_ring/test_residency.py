"""How a budget is shared between bundles that stay and a ring, judged by the limits and by what a pass would cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.errors import FieldOutOfRange
from app.gpu.weight_ring.residency import WeightPlan, plan_weights

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


def test_all_that_fits_is_kept() -> None:
    plan = plan_weights([LAYER] * 6, 6 * LAYER)
    assert plan.kept == frozenset(range(6))
    assert plan.streamed_bytes == plan.ring_bytes == 0


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


@given(layers=st.integers(3, 60), kept=st.integers(0, 57))
def test_what_comes_from_a_disk_is_read_from_first_to_last(layers: int, kept: int) -> None:
    kept = min(kept, layers - 3)
    plan = plan_weights([LAYER] * layers + [NORM], (2 + kept) * LAYER + NORM, from_disk=True)
    assert streamed_of(plan) == tuple(range(kept, layers))


def test_a_norm_stays_before_any_layer_does() -> None:
    sizes = [LAYER] * 10 + [NORM] + [LAYER // 2] * 4
    assert plan_weights(sizes, 2 * LAYER).kept == frozenset()
    assert plan_weights(sizes, 2 * LAYER + NORM).kept == {10}
    assert 10 in plan_weights(sizes, 5 * LAYER).kept


@given(bundles=st.integers(4, 40), use_share=st.floats(0, 0.5), pause_share=st.floats(0, 4))
def test_a_bundle_more_that_stays_saves_as_much_as_a_third_slot(
    bundles: int, use_share: float, pause_share: float
) -> None:
    streamed = streamed_of(plan_weights([LAYER] * bundles, 3 * LAYER))
    with_two_slots = _copy_times(streamed, bundles, 2, use_share, pause_share)
    with_three = _copy_times(range(bundles), bundles, 3, use_share, pause_share)
    assert with_two_slots <= with_three + 1, "the first pass alone has another copy to wait for"


def _copy_times(streamed: Container[int], bundles: int, slots: int, use: float, pause: float) -> float:
    """How long ten passes take, copies one after the other, each into the slot that has been free the longest.

    The unit is the time of one copy. A pass computes `use` for each bundle, and pauses for `pause` at its end.
    """
    slot_free, copied, now = deque([0.0] * slots), 0.0, 0.0
    for _ in range(10):
        for bundle in range(bundles):
            if bundle in streamed:
                copied = max(copied, slot_free.popleft()) + 1
                now = max(now, copied)
                slot_free.append(now + use)
            now += use
        now += pause
    return now


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
