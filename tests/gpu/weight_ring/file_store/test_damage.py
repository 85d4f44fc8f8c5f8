"""Whatever happens to the file: never a byte that was not stored, and what is lost is named."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import threading
import time
import zlib
from pathlib import Path

import pytest

from app.domain.errors import WeightsLost
from app.gpu.weight_files.file import BundleFile
from app.gpu.weight_files.header import Section
from app.gpu.weight_files.page_cache import has_writers
from tests.gpu.weight_files.bundles import overwrite
from tests.gpu.weight_ring.file_store.stored import (
    OTHER,
    SECTIONS,
    all_lost,
    gathers_or_says_so,
    load,
    loads_or_says_so,
    middle,
    open_store,
)


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
    assert all_lost(store) == ["bundle.1", "bundle.3"]
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
    assert set(all_lost(store)) == {name for name, section in SECTIONS.items() if section.nbytes}
    store.close()


@pytest.mark.parametrize("source", ["disk"], indirect=True)
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
    read = (section.nbytes for section in SECTIONS.values() if section.nbytes or section.name == "bundle.2")
    assert sorted(compared) == sorted(read)
    assert all_lost(store) == []
    assert len(compared) == len(SECTIONS)
    to_come = time.time_ns() + 10**18
    os.utime(path, ns=(to_come, to_come))
    for _ in range(2):
        assert all_lost(store) == []
    assert len(compared) == 2 * len(SECTIONS)
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
