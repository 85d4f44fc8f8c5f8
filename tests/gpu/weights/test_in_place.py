"""Bundles that are used where they are, in a file that the system has in memory, all of it or a part."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.domain.errors import WeightsLost
from app.gpu.device.streams import CpuStreams
from app.gpu.kernels.linear.base import Linear, Weight
from app.gpu.kernels.linear.cpu import PanelLinear
from app.gpu.kernels.linear.cpu.formats import to_panels
from app.gpu.weights.arena import Place
from app.gpu.weights.file import WeightFile
from app.gpu.weights.ring import StreamedWeights
from app.gpu.weights.stores import FileLoad, FileStore
from tests.gpu.weights.bundles import Gate, Model, overwrite, same_bits

NORM, WEIGHT = torch.arange(48.0), torch.randn(700, 48, generator=torch.Generator().manual_seed(0))
MODEL = Model([[NORM, to_panels(WEIGHT)[0]], [NORM + 1]], [])
X = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
EXPECTED = PanelLinear(WEIGHT)(X)
pytestmark = [pytest.mark.usefixtures("source"), pytest.mark.parametrize("source", ["memory"], indirect=True)]


@pytest.fixture
def store(path: Path, exact_clock: None) -> FileStore:
    file = WeightFile(path)
    file.check()
    return FileStore(file, 1 << 20)


def lend(store: FileStore, target: Tensor, guard: Gate | None = None) -> tuple[FileLoad, Weight, Weight]:
    """The first bundle, on its way to `target`, and its two weights."""
    bundle = store.load(0, target, [] if guard is None else [guard])
    assert isinstance(bundle, FileLoad)
    weights = []
    for tensor, piece in zip(MODEL.bundles[0], MODEL.layout.bundles[0].pieces, strict=True):
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
    section = MODEL.sections["bundle.0"]
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


def test_nothing_is_used_where_it_is_once_the_store_is_closed(store: FileStore) -> None:
    _, norm, weight = lend(store, MODEL.target(0))
    store.close()
    for lost in (norm, weight):
        with pytest.raises(WeightsLost, match="about to end"):
            _ = lost.tensor
    with pytest.raises(WeightsLost, match="about to end"):
        multiply(weight)


NUMBERS = [torch.full((64, 48), 1.0 + index) for index in range(6)]
NUMBERED = Model([[each.view(-1)[:256], to_panels(each)[0]] for each in NUMBERS], [])
ONES, SLOW = torch.ones(1, 48), 0


class Streaming:
    """Six bundles of a norm and a layer, whose numbers are 1 to 6, through a ring of two. The first is read from a disk
    that begins and does not end before `go_on`; the others are in memory.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file, read, layouts = NUMBERED.write(path), WeightFile.read, NUMBERED.layout.bundles
        self.begun, self.go_on, self.ended = (threading.Event() for _ in range(3))
        file.check()
        monkeypatch.setattr(WeightFile, "is_cached", lambda _, name: name != f"bundle.{SLOW}")

        def read_late(file: WeightFile, name: str, start: int, into: memoryview) -> None:
            late = threading.current_thread().name.startswith("djinn-weights")
            if late:
                self.begun.set()
                assert self.go_on.wait(timeout=20)
            read(file, name, start, into)
            if late:
                self.ended.set()

        store = FileStore(file, 1 << 20)
        self.weights = StreamedWeights(ONES.device, torch.float32, PanelLinear)
        monkeypatch.setattr(WeightFile, "read", read_late)
        self.norms: list[Weight] = []
        self.layers: list[Linear] = []
        for tensors in NUMBERED.bundles:
            with self.weights.bundle() as bundle:
                self.norms.append(bundle.hold(tensors[0].to("meta")))
                self.layers.append(bundle.linear(torch.empty(64, 48, device="meta")))
        assert self.weights.layout == NUMBERED.layout
        self.weights.stream_from(store, CpuStreams())
        self.memory = torch.zeros(2 * layouts[0].nbytes, dtype=torch.uint8)
        self.weights.place(self.memory, {}, Place(0, len(self.memory)))
        assert self.begun.wait(timeout=20)

    def end_the_read(self) -> None:
        """Whatever the disk still brings has come when this returns."""
        self.go_on.set()
        assert self.ended.wait(timeout=20)


@pytest.fixture
def streaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact_clock: None) -> Iterator[Streaming]:
    streaming = Streaming(tmp_path / "model.safetensors", monkeypatch)
    yield streaming
    streaming.go_on.set()
    streaming.weights.close()


def all_are(tensor: Tensor, number: float) -> bool:
    return torch.equal(tensor, torch.full_like(tensor, number))


def test_a_place_is_written_to_when_a_read_that_was_given_up_has_ended(streaming: Streaming) -> None:
    """Two bundles are used at that place before, where they are: neither has waited."""
    for index in (2, 3):
        with streaming.weights.using(index):
            assert all_are(streaming.layers[index](ONES), 48.0 * (index + 1))
    threading.Timer(0.1, streaming.go_on.set).start()
    with streaming.weights.using(4):
        norm = streaming.norms[4].tensor
        streaming.end_the_read()
        assert all_are(norm, 5.0)


def test_a_ring_is_let_go_of_when_nothing_writes_to_it_any_more(streaming: Streaming) -> None:
    with streaming.weights.using(2):
        assert all_are(streaming.layers[2](ONES), 144.0)
    threading.Timer(0.1, streaming.go_on.set).start()
    streaming.weights.vacate()
    seen = streaming.memory.clone()
    streaming.end_the_read()
    assert torch.equal(streaming.memory, seen)
