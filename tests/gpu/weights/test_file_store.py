"""Loading from the file of bundles: in order, behind its guards, and never a byte that was not stored."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import app.gpu.weights.bundle_file
from app.errors import WeightsLost
from app.gpu.streams import PASSED, CpuStream
from app.gpu.weights.bundle_file import BundleFile
from app.gpu.weights.bundle_header import Section, sections_of
from app.gpu.weights.file_store import FileStore
from tests.gpu.weights.bundles import Gate, Model, make_model, overwrite, same_bits

MODEL, OTHER = make_model(), make_model(seed=1)
SECTIONS = {section.name: section for section in sections_of(MODEL.contents)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of the file of `MODEL`."""
    MODEL.write(tmp_path / "model.safetensors").close()
    return tmp_path / "model.safetensors"


@pytest.fixture
def store(path: Path) -> Iterator[FileStore]:
    store = open_store(path)
    yield store
    store.close()


@pytest.fixture
def exact_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has just been written counts as proven."""
    monkeypatch.setattr(app.gpu.weights.bundle_file, "_CLOCK_NS", -1)


def open_store(path: Path, chunk_bytes: int = 1000) -> FileStore:
    return FileStore(BundleFile(path, MODEL.contents), chunk_bytes)


def load(store: FileStore, index: int) -> Tensor:
    target = MODEL.target(index)
    store.load(index, target, ()).synchronize()
    return target


def loads_or_says_so(store: FileStore, index: int) -> bool:
    """Whether the bundle is lost; if it is not, it is right."""
    try:
        assert MODEL.holds(index, load(store, index))
    except WeightsLost:
        return True
    return False


def gathers_or_says_so(store: FileStore, table: int) -> bool:
    """Whether the table is lost; if it is not, its rows are right."""
    ids = torch.arange(len(MODEL.tables[table]))
    try:
        assert same_bits(store.rows(table, ids), MODEL.tables[table])
    except WeightsLost:
        return True
    return False


def all_lost(store: FileStore) -> list[str]:
    """Names of the bundles and tables that are lost; all others are right."""
    bundles = [f"bundle.{index}" for index in range(len(MODEL.bundles)) if loads_or_says_so(store, index)]
    return bundles + [f"table.{index}" for index in range(len(MODEL.tables)) if gathers_or_says_so(store, index)]


def middle(section: Section) -> int:
    return section.offset + section.nbytes // 2


@pytest.mark.parametrize("chunk_bytes", [1, 999, 4096, 1 << 30])
def test_bundles_arrive_whatever_the_chunks(path: Path, chunk_bytes: int) -> None:
    store = open_store(path, chunk_bytes)
    targets = [MODEL.target(index) for index in range(len(MODEL.bundles))]
    events = [store.load(index, target, (PASSED,)) for index, target in enumerate(targets)]
    for index, (event, target) in enumerate(zip(events, targets, strict=True)):
        event.synchronize()
        assert event.query()
        assert MODEL.holds(index, target)
    store.close()


def test_a_target_of_another_size_is_refused(store: FileStore) -> None:
    with pytest.raises(ValueError, match="bundle 0 has"):
        store.load(0, torch.empty(256, dtype=torch.uint8), ())


def test_a_load_waits_for_its_guards_and_those_behind_it_wait_too(store: FileStore) -> None:
    gates, first, second = [Gate(), Gate()], MODEL.target(0), MODEL.target(1)
    before = first.clone()
    events = [store.load(0, first, gates), store.load(1, second, ())]
    gates[0].pass_by()
    time.sleep(0.05)
    assert not any(event.query() for event in events)
    assert torch.equal(first, before)
    gates[1].pass_by()
    events[1].synchronize()
    assert events[0].query()
    assert MODEL.holds(0, first)
    assert MODEL.holds(1, second)


def test_a_stream_of_the_cpu_waits_for_the_bytes(store: FileStore) -> None:
    gate, target = Gate(), MODEL.target(1)
    loaded = store.load(1, target, (gate,))
    threading.Timer(0.05, gate.pass_by).start()
    CpuStream().wait(loaded)
    assert MODEL.holds(1, target)


def test_a_load_that_failed_does_not_fail_what_comes_to_its_place_next(path: Path, store: FileStore) -> None:
    overwrite(path, middle(SECTIONS["bundle.0"]))
    failed, target = store.load(0, MODEL.target(0), ()), MODEL.target(1)
    store.load(1, target, (failed,)).synchronize()
    assert MODEL.holds(1, target)
    for _ in range(2):
        with pytest.raises(WeightsLost):
            failed.synchronize()


@pytest.mark.parametrize("ids", [[], [3], [0, 39], [7, 7, 7], [4, 5, 6, 0, 39, 5]])
def test_rows_are_gathered_in_the_order_they_are_asked_for(store: FileStore, ids: list[int]) -> None:
    wanted = torch.tensor(ids, dtype=torch.int64)
    assert same_bits(store.rows(0, wanted), MODEL.tables[0][wanted])
    few = wanted % 9
    assert same_bits(store.rows(1, few), MODEL.tables[1][few])


@pytest.mark.parametrize("row", [-1, 40])
def test_a_row_that_is_not_there_is_not_read_from_next_door(store: FileStore, row: int) -> None:
    with pytest.raises(IndexError, match="40 rows"):
        store.rows(0, torch.tensor([0, row]))


@pytest.mark.parametrize("name", [name for name, section in SECTIONS.items() if section.nbytes])
def test_what_went_bad_at_rest_is_found_at_start(path: Path, name: str) -> None:
    for place in (0, SECTIONS[name].nbytes // 2, SECTIONS[name].nbytes - 1):
        overwrite(path, SECTIONS[name].offset + place)
        with pytest.raises(WeightsLost, match=name) as refused:
            open_store(path)
        assert str(path) in refused.value.message
        assert "Delete the file" in refused.value.message
        overwrite(path, SECTIONS[name].offset + place)
    open_store(path).close()


@pytest.mark.usefixtures("exact_clock")
@pytest.mark.parametrize("name", ["bundle.0", "bundle.1", "bundle.3", "table.0", "table.1"])
@pytest.mark.parametrize("set_back", [False, True])
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
    assert all_lost(store) == ["bundle.1", "bundle.3", "table.0", "table.1"]
    with pytest.raises(WeightsLost, match=f"the file ends at byte {middle(SECTIONS['bundle.1'])}\\."):
        load(store, 1)
    store.close()


@pytest.mark.usefixtures("exact_clock")
def test_a_file_that_is_deleted_or_renamed_over_goes_on_serving(path: Path) -> None:
    store = open_store(path)
    path.unlink()
    assert all_lost(store) == []
    OTHER.write(path).close()
    assert all_lost(store) == []
    store.close()


@pytest.mark.usefixtures("exact_clock")
def test_other_weights_that_are_written_over_the_file_are_not_served(path: Path) -> None:
    store = open_store(path)
    OTHER.write(path.with_name("other.safetensors")).close()
    shutil.copyfile(path.with_name("other.safetensors"), path)  # in place, of the same size
    assert all_lost(store) == [name for name, section in SECTIONS.items() if section.nbytes]
    store.close()


@pytest.mark.usefixtures("exact_clock")
def test_a_file_that_changes_while_a_bundle_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = open_store(path, 4096), BundleFile.read

    def spoil_what_comes_next(file: BundleFile, section: Section, start: int, into: memoryview) -> None:
        read(file, section, start, into)
        if start == 0:
            overwrite(path, section.offset + len(into))

    monkeypatch.setattr(BundleFile, "read", spoil_what_comes_next)
    with pytest.raises(WeightsLost, match="checksum"):
        load(store, 1)
    store.close()


@pytest.mark.usefixtures("exact_clock")
def test_nothing_wrong_arrives_while_somebody_spoils_and_mends_the_file(path: Path) -> None:
    store, choice, ended = open_store(path), random.Random(0), threading.Event()

    def spoil() -> None:
        while not ended.is_set():
            place = choice.randrange(SECTIONS["bundle.0"].offset, path.stat().st_size)
            overwrite(path, place)
            time.sleep(choice.random() / 1000)
            overwrite(path, place)
            time.sleep(choice.random() / 500)

    spoiler = threading.Thread(target=spoil)
    spoiler.start()
    try:
        found = [loads_or_says_so(store, round_ % 2) for round_ in range(300)]
        found += [gathers_or_says_so(store, 0) for _ in range(100)]
    finally:
        ended.set()
        spoiler.join()
    assert not all(found)
    assert all_lost(store) == []
    store.close()


def test_rows_of_a_file_that_never_stands_still_are_not_returned(
    path: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksum = BundleFile.checksum

    def touch(file: BundleFile, section: Section) -> int:
        found = checksum(file, section)
        os.utime(path, ns=(0, time.monotonic_ns()))
        return found

    monkeypatch.setattr(BundleFile, "checksum", touch)
    with pytest.raises(WeightsLost, match="changes all the time"):
        store.rows(0, torch.tensor([1]))


@pytest.mark.usefixtures("exact_clock")
def test_checksums_are_compared_once_for_each_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, compared = open_store(path, 1 << 20), list[int]()
    crc32 = zlib.crc32

    def count(content: memoryview, value: int = 0) -> int:
        compared.append(len(content))
        return crc32(content, value)

    monkeypatch.setattr(zlib, "crc32", count)
    assert all_lost(store) == []
    assert compared == []
    path.touch()
    assert all_lost(store) == []
    assert compared == [section.nbytes for section in SECTIONS.values() if section.nbytes or section.name == "bundle.2"]
    assert all_lost(store) == []
    assert len(compared) == len(SECTIONS)
    store.close()


def test_a_change_that_bears_the_time_of_the_one_before_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the file system's clock ticks slowly, and somebody writes right after the server has started."""
    seen, fstat = os.stat(path), os.fstat

    def slow_clock(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        return seen if found.st_ino == seen.st_ino else found

    monkeypatch.setattr(os, "fstat", slow_clock)
    store = open_store(path)
    overwrite(path, middle(SECTIONS["bundle.1"]))
    overwrite(path, middle(SECTIONS["table.0"]))
    assert all_lost(store) == ["bundle.1", "table.0"]
    store.close()


def threads_of_stores() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("djinn-weights")]


def test_closing_ends_the_thread_and_the_loads_that_wait(path: Path) -> None:
    store, gate = open_store(path), Gate()
    events = [store.load(index, MODEL.target(index), (gate,)) for index in (0, 1, 3)]
    targets = [MODEL.target(0)]
    closing = threading.Thread(target=store.close)
    closing.start()
    events.append(store.load(0, targets[0], ()))
    time.sleep(0.02)
    gate.pass_by()
    closing.join()
    for event in events:
        assert event.query()
        with pytest.raises(WeightsLost, match="about to end"):
            event.synchronize()
    with pytest.raises(WeightsLost, match="about to end"):
        store.load(1, MODEL.target(1), ()).synchronize()
    with pytest.raises(WeightsLost, match="about to end"):
        store.rows(0, torch.tensor([1]))
    assert threads_of_stores() == []
    store.close()


def pages_in_memory(path: Path) -> int:
    """Bytes of the file that the system holds."""
    found = subprocess.run(["fincore", "-b", "-n", "-o", "RES", path], capture_output=True, check=True)
    return int(found.stdout)


@pytest.mark.skipif(shutil.which("fincore") is None, reason="needs fincore of util-linux")
def test_the_bundle_that_comes_next_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    size = 12 << 20
    large = Model([[torch.ones(size // 4)] for _ in range(4)], [])
    file = large.write(tmp_path / "large.safetensors")
    store = FileStore(file, 1 << 20)
    target = torch.empty(size, dtype=torch.uint8)
    for index in (0, 2):  # the others are kept, as it were
        store.load(index, target, ()).synchronize()
    with file.path.open("rb") as again:
        os.fsync(again.fileno())
        os.posix_fadvise(again.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(file.path):
        pytest.skip("the file system does not let go of what it holds")
    store.load(0, target, ()).synchronize()
    deadline = time.monotonic() + 10
    while pages_in_memory(file.path) < 2 * size and time.monotonic() < deadline:
        time.sleep(0.02)
    assert pages_in_memory(file.path) >= 2 * size
    store.close()
