"""Bundles and rows come from a file. Whatever happens to it, no wrong byte is used."""

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.domain.errors import WeightsLost
from app.gpu.device.streams import PASSED, CpuStreams
from app.gpu.kernels.linear import DenseLinear
from app.gpu.kernels.linear.base import BlockMatrix
from app.gpu.weights.arena import plan_weights
from app.gpu.weights.bundles import StreamedWeights
from app.gpu.weights.file import WeightFile, has_writers
from app.gpu.weights.layout import Piece
from app.gpu.weights.stores import FileStore
from tests.gpu.kernels.linear.blocks import draw_blocks
from tests.gpu.weights.bundles import Model, make_model, overwrite, same_bits


@pytest.fixture(autouse=True, params=["memory", "disk"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the file's bytes seem to be. A thread reads ahead what is on the disk."""
    monkeypatch.setattr(WeightFile, "is_cached", lambda *_: request.param == "memory")
    return str(request.param)


@pytest.fixture
def store(path: Path) -> Iterator[FileStore]:
    store = open_store(path)
    yield store
    store.close()


MODEL = make_model()
SECTIONS = MODEL.sections


def open_store(path: Path) -> FileStore:
    return FileStore(WeightFile(path))


def load(store: FileStore, index: int) -> Tensor:
    target = MODEL.target(index)
    store.load(index, target, PASSED).synchronize()
    return target


def all_lost(store: FileStore) -> list[str]:
    """Names of the bundles and tables that are lost; all others are right."""
    lost = []
    for name in sorted(SECTIONS):
        kind, number = name.split(".")
        index = int(number)
        try:
            if kind == "bundle":
                assert MODEL.holds(index, load(store, index))
            else:
                ids = torch.arange(len(MODEL.tables[index]))
                assert same_bits(store.rows(index, ids), MODEL.tables[index])
        except WeightsLost:
            lost.append(name)
    return lost


def middle(section: Piece) -> int:
    return section.offset + section.nbytes // 2


def test_bundles_arrive_and_those_in_memory_only_when_they_are_waited_for(store: FileStore, source: str) -> None:
    given_up, targets = MODEL.target(0), [MODEL.target(index) for index in range(len(MODEL.bundles))]
    before = given_up.clone()
    store.load(0, given_up, PASSED)
    events = [store.load(index, target, PASSED) for index, target in enumerate(targets)]
    for index, (event, target) in enumerate(zip(events, targets, strict=True)):
        event.synchronize()
        assert event.query()
        assert MODEL.holds(index, target)
    assert torch.equal(given_up, before) == (source == "memory")
    with pytest.raises(ValueError, match=r"bundle\.0 has"):
        store.load(0, torch.empty(256, dtype=torch.uint8), PASSED)


def test_a_read_that_was_given_up_does_not_write_over_what_comes_to_its_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when another bundle has been used in the file in between, and has written nothing."""
    store, read, late = open_store(path), WeightFile.read, threading.Event()

    def read_late(file: WeightFile, name: str, start: int, into: memoryview) -> None:
        if threading.current_thread().name.startswith("djinn-weights"):
            assert late.wait(timeout=20)
        read(file, name, start, into)

    monkeypatch.setattr(WeightFile, "read", read_late)
    monkeypatch.setattr(WeightFile, "is_cached", lambda _, name: name != "bundle.0")
    place = MODEL.target(1)
    given_up = store.load(0, place[: MODEL.target(0).nbytes], PASSED)
    unused = store.load(1, place, given_up)
    last = store.load(3, place[: MODEL.target(3).nbytes], PASSED)
    threading.Timer(0.05, late.set).start()
    last.synchronize()
    store.close()
    assert MODEL.holds(3, place[: MODEL.target(3).nbytes])
    assert not unused.query()


def test_a_load_that_failed_does_not_fail_what_comes_to_its_place_next(path: Path, store: FileStore) -> None:
    overwrite(path, middle(SECTIONS["bundle.0"]))
    failed, target = store.load(0, MODEL.target(0), PASSED), MODEL.target(1)
    store.load(1, target, failed).synchronize()
    assert MODEL.holds(1, target)
    for _ in range(2):
        with pytest.raises(WeightsLost):
            failed.synchronize()


def test_rows_are_gathered_in_the_order_they_are_asked_for(store: FileStore) -> None:
    for ids in ([], [3], [0, 39], [7, 7, 7], [4, 5, 6, 0, 39, 5]):
        wanted = torch.tensor(ids, dtype=torch.int64)
        assert same_bits(store.rows(0, wanted), MODEL.tables[0][wanted])
        assert same_bits(store.rows(1, wanted % 9), MODEL.tables[1][wanted % 9])
    for row in (-1, 40):
        with pytest.raises(IndexError, match="40 rows"):
            store.rows(0, torch.tensor([0, row]))


def test_rows_of_blocks_have_the_values_of_the_whole(tmp_path: Path) -> None:
    matrix = draw_blocks("Q8_0", 50, 2)
    store = FileStore(Model([[torch.ones(4)]], [matrix.rows]).write(tmp_path / "model.safetensors"))
    weights = StreamedWeights(torch.device("cpu"), torch.float32, DenseLinear)
    rows = weights.table(BlockMatrix("Q8_0", matrix.rows.to("meta"), matrix.shape))
    weights.stream_from(store, CpuStreams(), plan_weights([256], 256))
    ids = torch.tensor([7, 49, 0, 7])
    assert torch.equal(rows(ids), matrix.dequantize()[ids])
    weights.close()


@pytest.mark.parametrize("name", [name for name, section in SECTIONS.items() if section.nbytes])
def test_what_went_bad_at_rest_without_a_trace_is_found_when_it_is_first_used(path: Path, name: str) -> None:
    before = path.stat()
    overwrite(path, middle(SECTIONS[name]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    store = FileStore(MODEL.write(path))
    assert all_lost(store) == [name]
    store.close()


@pytest.mark.usefixtures("exact_clock")
@pytest.mark.parametrize(("name", "set_back"), [("bundle.0", False), ("bundle.3", True), ("table.1", False)])
def test_what_goes_bad_while_serving_is_lost_and_comes_back(path: Path, name: str, set_back: bool) -> None:
    store, before = open_store(path), path.stat()
    overwrite(path, middle(SECTIONS[name]))
    if set_back:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert all_lost(store) == [name]
    overwrite(path, middle(SECTIONS[name]))
    assert all_lost(store) == []
    store.close()


@pytest.mark.usefixtures("exact_clock")
def test_what_is_behind_the_new_end_is_lost(path: Path) -> None:
    store = open_store(path)
    os.truncate(path, middle(SECTIONS["bundle.1"]))
    assert all_lost(store) == ["bundle.1", "bundle.3"]
    with pytest.raises(WeightsLost, match=f"the file ends at byte {middle(SECTIONS['bundle.1'])}\\."):
        load(store, 1)
    store.close()


@pytest.mark.usefixtures("exact_clock")
def test_what_changes_without_a_new_time_while_the_file_is_open_for_writing_is_lost(path: Path) -> None:
    """As what a store through a mapping changes in a page that was written to before, or a write call that lasts."""
    place = middle(SECTIONS["bundle.1"])
    with path.open("r+b") as writer, mmap.mmap(writer.fileno(), 0) as mapped:
        if not has_writers_of(path):
            pytest.skip("this file system has no leases")
        for _ in range(2):
            mapped[place] ^= 1
        store = open_store(path)
        assert all_lost(store) == []
        mapped[place] ^= 1
        assert all_lost(store) == ["bundle.1"]
        mapped[place] ^= 1
        assert all_lost(store) == []
    assert not has_writers_of(path)
    store.close()


def has_writers_of(path: Path) -> bool:
    with path.open("rb") as file:
        return has_writers(file.fileno())
