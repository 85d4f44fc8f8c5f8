"""Bundles in host memory: what is written is loaded, behind its guards, in chunks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import psutil
import pytest
import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.device.streams import WHOLE, CpuStream, CpuStreams, Event, Run
from app.gpu.weight_ring.pinned_store import PinnedStore
from tests.gpu.device.deferring import DeferredDevice
from tests.gpu.weight_files.bundles import Model, make_model, same_bits

MODEL = make_model()
SEEDS = range(8)


class NotingStreams(CpuStreams):
    """Notes what is copied on the stream of weights, and the slab."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = self.noting = NotingStream()
        self.slabs: list[weakref.ref[Tensor]] = []

    def host_slab(self, shape: tuple[int, ...]) -> Tensor:
        slab = super().host_slab(shape)
        self.slabs.append(weakref.ref(slab))
        return slab


class NotingStream(CpuStream):
    def __init__(self) -> None:
        self.lengths: list[int] = []

    def copy(self, target: Tensor, source: Tensor, runs: Iterable[Run] = WHOLE) -> None:
        for write, read in runs:
            self.lengths.append(write.stop - write.start)
            super().copy(target, source, [(write, read)])


def filled(streams: CpuStreams | DeferredDevice, model: Model = MODEL, chunk_bytes: int = 1000) -> PinnedStore:
    store = PinnedStore(model.contents.layouts, model.contents.tables, streams, chunk_bytes)
    model.fill(store)
    return store


@pytest.mark.parametrize("chunk_bytes", [1, 999, 1 << 30])
def test_what_was_written_is_loaded(chunk_bytes: int) -> None:
    store = filled(CpuStreams(), chunk_bytes=chunk_bytes)
    for index in range(len(MODEL.bundles)):
        target = MODEL.target(index)
        store.load(index, target, ()).synchronize()
        assert MODEL.holds(index, target)
    store.close()


def test_no_copy_is_longer_than_a_chunk() -> None:
    streams = NotingStreams()
    filled(streams, chunk_bytes=5000).load(1, MODEL.target(1), ())
    assert streams.noting.lengths == [5000, 5000, 5000, 16384 - 15000]


@pytest.mark.parametrize("ids", [[], [3], [39, 0, 39, 4, 5]])
def test_rows_are_gathered(ids: list[int]) -> None:
    store, wanted = filled(CpuStreams()), torch.tensor(ids, dtype=torch.int64)
    assert same_bits(store.rows(0, wanted), MODEL.tables[0][wanted])
    assert same_bits(store.rows(1, wanted % 9), MODEL.tables[1][wanted % 9])


@pytest.mark.parametrize("row", [-1, 40])
def test_a_row_that_is_not_there_is_refused(row: int) -> None:
    with pytest.raises(IndexError):
        filled(CpuStreams()).rows(0, torch.tensor([row]))


def test_more_memory_than_is_free_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, needed = NotingStreams(), 3 << 30
    large = [torch.empty(needed // 4, device="meta")]
    contents = Model([large], []).contents
    free = psutil.virtual_memory()._replace(available=2 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(FieldOutOfRange, match=r"no memory for 3\.0 GiB .* 2\.0 GiB of host memory are free") as refused:
        PinnedStore(contents.layouts, (), streams, 1000)
    assert refused.value.param == "weights_device"
    assert streams.slabs == []


def test_the_slab_lives_as_long_as_the_store() -> None:
    """Its memory is pinned until the tensor is gone, whoever else holds a view of it."""
    streams = NotingStreams()
    store = filled(streams)
    gc.collect()
    [slab] = streams.slabs
    assert slab() is not None
    store.close()
    gc.collect()
    assert slab() is None


def stream_through_one_place(device: DeferredDevice, guarded: bool = True) -> bool:
    """Load bundles 0 and 1 to the same place, one after the other, and use each; whether all was right."""
    layouts = MODEL.contents.layouts
    place = torch.zeros(max(layout.nbytes for layout in layouts), dtype=torch.uint8)
    used = [torch.zeros(layouts[index].nbytes, dtype=torch.uint8) for index in (0, 1, 0)]
    store = filled(device, chunk_bytes=3000)
    guards: list[Event] = []
    for index, target in zip((0, 1, 0), used, strict=True):
        memory = place[: layouts[index].nbytes]
        device.compute.wait(store.load(index, memory, guards))
        device.compute.copy(target, memory)
        guards = [device.compute.record()] if guarded else []
    device.compute.record().synchronize()
    return all(MODEL.holds(index, target) for index, target in zip((0, 1, 0), used, strict=True))


@pytest.mark.parametrize("late", [None, "compute", "weights"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_place_is_used_again_behind_its_guards(seed: int, late: str | None) -> None:
    assert stream_through_one_place(DeferredDevice(seed, late))


def test_without_guards_it_shows() -> None:
    assert not all(stream_through_one_place(DeferredDevice(seed, "compute"), guarded=False) for seed in SEEDS)


def test_closing_waits_for_what_has_been_launched() -> None:
    device, target = DeferredDevice(0, late="weights"), MODEL.target(0)
    store = filled(device)
    store.load(0, target, ())
    store.close()
    assert MODEL.holds(0, target)
