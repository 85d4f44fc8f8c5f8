"""The ring under a device that copies and computes as late as it may, in any order that the guards allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.gpu.weight_ring.ring import Place, Ring
from tests.examples import examples

pytestmark = pytest.mark.examples

MAX_RING = 24


@dataclass(eq=False)
class Work:
    """A copy into a place, or a use of what was copied there. It may run once everything in `after` has run."""

    bundle: int
    place: Place
    copies: bool
    after: Sequence[Work]
    done: bool = False

    @property
    def ready(self) -> bool:
        return not self.done and all(work.done for work in self.after)


class RingMachine(RuleBasedStateMachine):
    """Bundles are loaded and used; `memory` says which bundle each byte holds when the device comes to it."""

    @initialize(size=st.integers(1, MAX_RING))
    def make(self, size: int) -> None:
        self.ring: Ring[Work] = Ring(size)
        self.memory = [-1] * size
        self.last_use: list[Work | None] = [None] * size
        self.works: list[Work] = []
        self.held: dict[Place, Work] = {}
        self.end = 0
        self.loaded = 0

    @rule(share=st.floats(0, 1))
    def load(self, share: float) -> None:
        size = 1 + int(share * (self.ring.size - 1))
        room = self.ring.reserve(size)
        wraps = self.end + size > self.ring.size
        wanted = [*range(self.end, self.ring.size), *range(size)] if wraps else [*range(self.end, self.end + size)]
        held = {byte for place in self.held for byte in range(place.start, place.end)}
        assert (room is None) == bool(held & set(wanted)), "it waits for what is in its way, and for nothing else"
        if room is None:
            return
        place, guards = room
        assert (place.start, place.end) == ((0, size) if wraps else (self.end, self.end + size))
        uses = self.last_use[place.start : place.end]
        assert sorted(map(id, guards)) == sorted({id(use) for use in uses if use is not None})
        self.held[place] = Work(self.loaded, place, copies=True, after=guards)
        self.last_use[place.start : place.end] = [None] * size
        self.works.append(self.held[place])
        self.end = place.end
        self.loaded += 1

    @precondition(lambda self: self.held)
    @rule(choice=st.floats(0, 0.999))
    def use(self, choice: float) -> None:
        """Launch the use of any bundle in the ring, and release it at once."""
        place = list(self.held)[int(choice * len(self.held))]
        copy = self.held.pop(place)
        use = Work(copy.bundle, place, copies=False, after=[copy])
        self.last_use[place.start : place.end] = [use] * (place.end - place.start)
        self.works.append(use)
        self.ring.release(place, use)

    @rule(choices=st.lists(st.floats(0, 0.999), min_size=1, max_size=4))
    def device_works(self, choices: list[float]) -> None:
        for choice in choices:
            ready = [work for work in self.works if work.ready]
            if ready:
                self.run(ready[int(choice * len(ready))])

    def run(self, work: Work) -> None:
        where = slice(work.place.start, work.place.end)
        if work.copies:
            self.memory[where] = [work.bundle] * (work.place.end - work.place.start)
        else:
            assert set(self.memory[where]) == {work.bundle}, "a bundle is overwritten before it is used"
        work.done = True
        self.works.remove(work)

    @invariant()
    def places_in_use_never_overlap(self) -> None:
        bytes_in_use = [byte for place in self.held for byte in range(place.start, place.end)]
        assert len(bytes_in_use) == len(set(bytes_in_use))
        assert all(0 <= byte < self.ring.size for byte in bytes_in_use)

    def teardown(self) -> None:
        """Once nothing is in use the whole ring can be had, and the device comes to the end of all its work."""
        while self.held:
            self.use(0)
        self.load(1)
        while self.works:
            self.run(next(work for work in reversed(self.works) if work.ready))


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=examples(300), stateful_step_count=60)


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


def test_the_rest_at_the_end_is_skipped_and_keeps_its_guard() -> None:
    ring: Ring[str] = Ring(10)
    assert ring.reserve(6) == (Place(0, 6), [])
    assert ring.reserve(4) == (Place(6, 10), [])
    ring.release(Place(6, 10), "second")
    ring.release(Place(0, 6), "first")
    assert ring.reserve(7) == (Place(0, 7), ["second", "first"])
    ring.release(Place(0, 7), "third")
    assert ring.reserve(5) == (Place(0, 5), ["third"]), "the three bytes left are too few"
    assert ring.reserve(5) == (Place(5, 10), ["second", "third"])


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


@pytest.mark.parametrize("size", [-256, 0, 1025])
def test_a_size_that_the_ring_can_never_hold_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"{size} bytes asked of a ring of 1024 bytes"):
        Ring[str](1024).reserve(size)


def test_only_what_is_in_use_can_be_released() -> None:
    ring: Ring[str] = Ring(1024)
    room = ring.reserve(256)
    assert room is not None
    ring.release(room[0], "used")
    with pytest.raises(RuntimeError, match="not in use"):
        ring.release(room[0], "again")
