"""Weights that are streamed from a file, part of it in memory and part on a disk that takes its time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import app.gpu.weight_files.file
from app.gpu.device.streams import CpuStreams
from app.gpu.linear.base import Linear
from app.gpu.linear.cpu.layers import PanelLinear
from app.gpu.linear.cpu.packing import to_panels
from app.gpu.linear.weight import Weight
from app.gpu.weight_files.file import BundleFile
from app.gpu.weight_files.header import Section
from app.gpu.weight_ring.file_store import FileStore
from app.gpu.weight_ring.ring import Place
from app.gpu.weight_ring.streamed import StreamedText
from tests.gpu.weight_files.bundles import Model

COUNT, SLOW = 6, 0
X = torch.ones(1, 48)
MODEL = Model([[torch.full((256,), 1.0 + i), to_panels(torch.full((64, 48), 1.0 + i))[0]] for i in range(COUNT)], [])
BYTES = MODEL.contents.layouts[0].nbytes


class Streaming:
    """Six bundles of a norm and a layer, whose numbers are 1 to 6, through a ring of two. The first is read from a disk
    that begins and does not end before `go_on`; the others are in memory.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(app.gpu.weight_files.file, "_CLOCK_NS", -1)
        file, read = MODEL.write(path), BundleFile.read
        self.begun, self.go_on, self.ended = (threading.Event() for _ in range(3))
        monkeypatch.setattr(BundleFile, "is_cached", lambda _, section: section != file.bundles[SLOW])

        def read_late(file: BundleFile, section: Section, start: int, into: memoryview) -> None:
            late = threading.current_thread().name.startswith("djinn-weights")
            if late:
                self.begun.set()
                assert self.go_on.wait(timeout=20)
            read(file, section, start, into)
            if late:
                self.ended.set()

        store = FileStore(file, 1 << 20)
        self.text = StreamedText(X.device, torch.float32, MODEL.contents.layouts, store, CpuStreams(), PanelLinear)
        monkeypatch.setattr(BundleFile, "read", read_late)
        self.norms: list[Weight] = []
        self.layers: list[Linear] = []
        self.weights: list[Weight] = []
        for tensors in MODEL.bundles:
            with self.text.bundle() as bundle:
                self.norms.append(bundle.hold(tensors[0].to("meta")))
                self.layers.append(bundle.linear(torch.empty(64, 48, device="meta")))
                self.weights.append(bundle.weights[1])
        self.memory = torch.zeros(2 * BYTES, dtype=torch.uint8)
        self.text.place(self.memory, {}, Place(0, 2 * BYTES))
        assert self.begun.wait(timeout=20)

    def end_the_read(self) -> None:
        """Whatever the disk still brings has come when this returns."""
        self.go_on.set()
        assert self.ended.wait(timeout=20)


@pytest.fixture
def streaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Streaming]:
    streaming = Streaming(tmp_path / "model.safetensors", monkeypatch)
    yield streaming
    streaming.go_on.set()
    streaming.text.close()


def all_are(tensor: Tensor, number: float) -> bool:
    return torch.equal(tensor, torch.full_like(tensor, number))


def test_a_place_is_written_to_when_a_read_that_was_given_up_has_ended(streaming: Streaming) -> None:
    """Two bundles are used at that place before, where they are: neither has waited."""
    for index in (2, 3):
        with streaming.text.using(index):
            assert all_are(streaming.layers[index](X), 48.0 * (index + 1))
    threading.Timer(0.1, streaming.go_on.set).start()
    with streaming.text.using(4):
        norm = streaming.norms[4].tensor
        streaming.end_the_read()
        assert all_are(norm, 5.0)


def test_a_ring_is_let_go_of_when_nothing_writes_to_it_any_more(streaming: Streaming) -> None:
    with streaming.text.using(2):
        assert all_are(streaming.layers[2](X), 144.0)
    threading.Timer(0.1, streaming.go_on.set).start()
    streaming.text.vacate()
    seen = streaming.memory.clone()
    streaming.end_the_read()
    assert torch.equal(streaming.memory, seen)
