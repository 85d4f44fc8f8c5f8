"""Bundles that are used where they are, in a file that the system has in memory."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.domain.errors import WeightsLost
from app.gpu.linear.cpu.layers import PanelLinear
from app.gpu.linear.cpu.packing import to_panels
from app.gpu.linear.weight import Weight
from app.gpu.weight_files.file import BundleFile
from app.gpu.weight_files.header import sections_of
from app.gpu.weight_ring.cached_bundle import CachedBundle
from app.gpu.weight_ring.file_store import FileStore
from tests.gpu.weight_files.bundles import Gate, Model, overwrite, same_bits
from tests.gpu.weight_ring.test_file_store import exact_clock, source

__all__ = ["exact_clock", "source"]

NORM, WEIGHT = torch.arange(48.0), torch.randn(700, 48, generator=torch.Generator().manual_seed(0))
MODEL = Model([[NORM, to_panels(WEIGHT)[0]], [NORM + 1]], [])
X = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
EXPECTED = PanelLinear(WEIGHT)(X)
pytestmark = pytest.mark.parametrize("source", ["memory"], indirect=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    MODEL.write(tmp_path / "model.safetensors").close()
    return tmp_path / "model.safetensors"


@pytest.fixture
def store(path: Path, exact_clock: None) -> FileStore:
    return FileStore(BundleFile(path, MODEL.contents), 1 << 20)


def lend(store: FileStore, target: Tensor, guard: Gate | None = None) -> tuple[CachedBundle, Weight, Weight]:
    """The first bundle, on its way to `target`, and its two weights."""
    bundle = store.load(0, target, [] if guard is None else [guard])
    assert isinstance(bundle, CachedBundle)
    weights = []
    for tensor, piece in zip(MODEL.bundles[0], MODEL.contents.layouts[0].pieces, strict=True):
        weights.append(Weight(tensor.to("meta")))
        weights[-1].place = bundle.tensor(piece)
    return bundle, weights[0], weights[1]


def multiply(weight: Weight) -> Tensor:
    linear = PanelLinear(WEIGHT.to("meta"))
    linear.weights[0].place = weight.place
    return linear(X)


def test_a_product_is_made_without_a_copy_and_a_small_tensor_is_copied_alone(store: FileStore) -> None:
    target = MODEL.target(0)
    before = target.clone()
    bundle, norm, weight = lend(store, target)
    assert torch.equal(multiply(weight), EXPECTED)
    assert torch.equal(target, before)
    assert same_bits(norm.tensor, NORM)
    assert torch.equal(target[NORM.nbytes :], before[NORM.nbytes :])
    assert not bundle.query()
    assert same_bits(weight.tensor, MODEL.bundles[0][1])
    assert bundle.query()
    assert MODEL.holds(0, target)
    store.close()


def test_nothing_is_copied_to_a_place_that_is_still_in_use(store: FileStore) -> None:
    gate, target = Gate(), MODEL.target(0)
    before = target.clone()
    _, norm, weight = lend(store, target, gate)
    assert torch.equal(multiply(weight), EXPECTED), "this writes nothing"
    seen: list[Tensor] = []

    def pass_by() -> None:
        seen.append(target.clone())
        gate.pass_by()

    threading.Timer(0.05, pass_by).start()
    assert same_bits(norm.tensor, NORM)
    assert torch.equal(seen[0], before)
    store.close()


def test_whatever_changes_after_the_start_is_noticed_before_a_result_is_used(path: Path, store: FileStore) -> None:
    section = sections_of(MODEL.contents)[0]
    bundle, norm, weight = lend(store, MODEL.target(0))
    assert bundle.is_intact()
    overwrite(path, section.offset + 4000)
    assert not bundle.is_intact()
    for lost in (norm, weight):
        with pytest.raises(WeightsLost, match=r"bundle\.0.*checksum"):
            _ = lost.tensor
        with pytest.raises(WeightsLost):
            multiply(weight)
    overwrite(path, section.offset + 4000)
    _, norm, weight = lend(store, MODEL.target(0))
    assert torch.equal(multiply(weight), EXPECTED)
    assert same_bits(norm.tensor, NORM)
    store.close()


def test_no_product_is_wrong_while_somebody_spoils_and_mends_the_file(path: Path, store: FileStore) -> None:
    choice, ended, lost = random.Random(0), threading.Event(), 0
    section = sections_of(MODEL.contents)[0]

    def spoil() -> None:
        while not ended.is_set():
            place = section.offset + choice.randrange(section.nbytes)
            overwrite(path, place)
            time.sleep(choice.random() / 2000)
            overwrite(path, place)
            time.sleep(0.01)  # a tick of the coarsest clock that a kernel marks changes with

    spoiler = threading.Thread(target=spoil)
    spoiler.start()
    try:
        for _ in range(300):
            _, norm, weight = lend(store, MODEL.target(0))
            try:
                assert torch.equal(multiply(weight), EXPECTED)
                assert same_bits(norm.tensor, NORM)
            except WeightsLost:
                lost += 1
    finally:
        ended.set()
        spoiler.join()
    assert 0 < lost < 300
    store.close()


def test_nothing_is_used_where_it_is_once_the_store_is_closed(store: FileStore) -> None:
    _, norm, weight = lend(store, MODEL.target(0))
    store.close()
    for lost in (norm, weight):
        with pytest.raises(WeightsLost, match="about to end"):
            _ = lost.tensor
    with pytest.raises(WeightsLost, match="about to end"):
        multiply(weight)
