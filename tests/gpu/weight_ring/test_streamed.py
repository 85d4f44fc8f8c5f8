"""Weights that pass through a ring on a device that does its work late, in any order that the events allow: whoever
computes with them finds the right ones. And whatever wait is left out, it shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from app.gpu.linear.dense import DenseLinear
from app.gpu.linear.weight import Weight
from app.gpu.weight_files.layout import BundleLayout
from app.gpu.weight_ring.arena import lay_out
from app.gpu.weight_ring.pinned_store import PinnedStore
from app.gpu.weight_ring.residency import plan_weights
from app.gpu.weight_ring.streamed import StreamedText
from tests.gpu.device.deferring import DeferredDevice

CPU = torch.device("cpu")
ROWS = [3, 8, 1, 8, 5, 8, 2, 7]


class Toy:
    """A model that adds its bundles to what it has; in which order it has done so shows."""

    def __init__(self, device: DeferredDevice, rows: Sequence[int], spare: int) -> None:
        """Bundles of so many rows, 64 wide, on a device with `spare` bytes more than a ring of them needs."""
        self.device = device
        generator = torch.Generator().manual_seed(0)
        self.stored = [torch.randn(count, 64, generator=generator) for count in rows]
        self.layouts = layouts = [BundleLayout.of([tensor]) for tensor in self.stored]
        sizes = [layout.nbytes for layout in layouts]
        store = PinnedStore(layouts, [], device, chunk_bytes=512)
        for index, tensor in enumerate(self.stored):
            store.bundle(index, [tensor])
        self.text = StreamedText(CPU, torch.float32, layouts, store, device, DenseLinear)
        self.weights: list[Weight] = []
        for tensor in self.stored:
            with self.text.bundle() as bundle:
                self.weights.append(bundle.hold(tensor.to("meta")))
        self.arena = lay_out(plan_weights(sizes, 2 * max(sizes) + spare), 0, 1)

    def place(self) -> Tensor:
        """Give it memory that the device has yet to clear, and return that."""
        memory = self.device.adopt(torch.full((self.arena.nbytes,), 77, dtype=torch.uint8)).zero_()
        self.text.place(memory, self.arena.places, self.arena.ring)
        return memory

    def run(self, state: Tensor, bundles: Sequence[int]) -> None:
        for index in bundles:
            with self.text.using(index):
                state.mul_(0.5).add_(self.weights[index].tensor.sum(0))

    def expect(self, passes: Sequence[Sequence[int]]) -> Tensor:
        state = torch.zeros(64)
        for index in itertools.chain(*passes):
            state.mul_(0.5).add_(self.stored[index].sum(0))
        return state


def passes_of(count: int, chance: random.Random) -> Iterator[Sequence[int]]:
    """Some of them begin or end anywhere."""
    for _ in range(12):
        lo, hi = sorted((chance.randrange(count), chance.randrange(count + 1)))
        yield chance.choice([range(count), range(lo, hi)])


def goes_wrong(
    seed: int,
    late: str | None,
    rows: Sequence[int],
    spare: int,
    *,
    lend: bool = False,
) -> bool:
    """Whether some passes come to another result than they should."""
    chance, device, lent = random.Random(seed), DeferredDevice(seed, late), 0
    toy, passes = Toy(device, rows, spare), list(passes_of(len(rows), chance))
    wanted = toy.expect(passes)
    with device:
        state = torch.zeros(64)
        memory = toy.place()
        for bundles in passes:
            toy.run(state, bundles)
            if lend and chance.random() < 0.5 and lent < len(toy.arena.lendable):
                place = toy.arena.places[toy.arena.lendable[lent]]
                toy.text.lend(toy.arena.lendable[lent])
                memory[place.start : place.end].fill_(99)  # as KV writes there
                lent += 1
            elif lent:
                lent -= 1
                toy.text.take_back(toy.arena.lendable[lent])
        device.finish()
    return not torch.equal(state, wanted)


@given(
    seed=st.integers(0, 10**6),
    late=st.sampled_from([None, "compute", "weights"]),
    rows=st.lists(st.integers(1, 8), min_size=1, max_size=9),
    spare=st.integers(0, 6000),
    lend=st.booleans(),
)
def test_every_pass_finds_its_weights(seed: int, late: str | None, rows: list[int], spare: int, lend: bool) -> None:
    """Also while bundles are lent between passes, and come back."""
    assert not goes_wrong(seed, late, rows, spare, lend=lend)
