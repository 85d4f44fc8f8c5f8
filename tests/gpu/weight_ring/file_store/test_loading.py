"""Bundles arrive in order, behind their guards, until the store is closed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from app.domain.errors import WeightsLost
from app.gpu.device.streams import PASSED, CpuStream
from app.gpu.weight_files.file import BundleFile
from app.gpu.weight_ring.file_store import FileStore
from tests.gpu.weight_files.bundles import Gate, overwrite
from tests.gpu.weight_ring.file_store.stored import (
    MODEL,
    SECTIONS,
    middle,
    open_store,
)


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


@pytest.mark.parametrize("source", ["disk"], indirect=True)
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


@pytest.mark.parametrize("source", ["memory"], indirect=True)
def test_a_copy_is_made_by_who_waits_for_it_and_one_that_nobody_waits_for_is_not(store: FileStore) -> None:
    target, after = MODEL.target(0), MODEL.target(1)
    before, given_up = target.clone(), store.load(0, target, ())
    store.load(1, after, (given_up,)).synchronize()
    assert MODEL.holds(1, after)
    assert torch.equal(target, before)
    assert not given_up.query()
    given_up.synchronize()
    assert MODEL.holds(0, target)
    assert threads_of_stores() == []


@pytest.mark.parametrize("source", ["memory"], indirect=True)
def test_a_copy_waits_for_what_a_thread_reads_to_its_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate, target = open_store(path), Gate(), MODEL.target(0)
    with monkeypatch.context() as patch:
        patch.setattr(BundleFile, "is_cached", lambda *_: False)
        read = store.load(0, target, (gate,))
    copied = store.load(0, target, (read,))
    threading.Timer(0.05, gate.pass_by).start()
    copied.synchronize()
    assert read.query()
    assert MODEL.holds(0, target)
    store.close()


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
        with pytest.raises(WeightsLost, match="about to end"):
            event.synchronize()
        assert event.query()
    with pytest.raises(WeightsLost, match="about to end"):
        store.load(1, MODEL.target(1), ()).synchronize()
    with pytest.raises(WeightsLost, match="about to end"):
        store.rows(0, torch.tensor([1]))
    assert threads_of_stores() == []
    store.close()
