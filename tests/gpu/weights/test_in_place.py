"""What changes in a bundle that is used where it is, in a file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.domain.errors import WeightsLost
from app.gpu.device.streams import PASSED
from app.gpu.kernels.linear.base import Weight
from app.gpu.kernels.linear.formats import to_panels
from app.gpu.kernels.linear.panels import PanelLinear
from app.gpu.weights.file import WeightFile
from app.gpu.weights.stores import FileLoad, FileStore
from tests.gpu.weights.bundles import Model, overwrite, same_bits

NORM, WEIGHT = torch.arange(48.0), torch.randn(700, 48, generator=torch.Generator().manual_seed(0))
MODEL = Model([[NORM, to_panels(WEIGHT)[0]], [NORM + 1]], [])
X = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
EXPECTED = PanelLinear(WEIGHT)(X)


@pytest.fixture(autouse=True)
def all_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightFile, "is_cached", lambda *_: True)


@pytest.fixture
def store(path: Path, exact_clock: None) -> FileStore:
    file = WeightFile(path)
    file.check()
    return FileStore(file)


def lend(store: FileStore, target: Tensor) -> tuple[FileLoad, Weight, Weight]:
    """The first bundle, on its way to `target`, and its two weights."""
    bundle = store.load(0, target, PASSED)
    weights = []
    for tensor, piece in zip(MODEL.bundles[0], MODEL.layout.bundles[0].pieces, strict=True):
        weights.append(Weight(tensor.to("meta")))
        weights[-1].place = bundle.place(piece)
    return bundle, weights[0], weights[1]


def multiply(weight: Weight) -> Tensor:
    linear = PanelLinear(WEIGHT.to("meta"))
    linear.weights[0].place = weight.place
    return linear(X)


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


@pytest.mark.usefixtures("exact_clock")
def test_of_experts_in_a_file_those_that_are_visited_are_read_alone(tmp_path: Path) -> None:
    """The system counts the bytes that the process reads."""
    experts, starts = 32, torch.tensor([0] * 8 + [1] * 16 + [2] * 9, dtype=torch.int32)
    weight = torch.randn(experts * 512, 48, generator=torch.Generator().manual_seed(2))
    panels = to_panels(weight)[0]
    store = FileStore(Model([[panels]], []).write(tmp_path / "model.safetensors"), {0: [0]})
    store.file.check()
    linear, x = PanelLinear(weight.to("meta"), None, experts), torch.randn(1, 2, 48)
    target = torch.empty(store.file.sections["bundle.0"].nbytes, dtype=torch.uint8)
    [piece] = store.file.layout.bundles[0].pieces
    linear.weights[0].place = store.load(0, target, PASSED).place(piece)
    counts, found = [0, 0], linear(x, starts)  # its kernel is there now
    for number in range(2):
        counts[number] = int(Path("/proc/self/io").read_text().split()[1])
        assert torch.equal(linear(x, starts), found) or number
    read = counts[1] - counts[0]
    assert torch.equal(found, PanelLinear(weight, None, experts)(x, starts))
    assert 2 * panels.nbytes / experts <= read < 3 * panels.nbytes / experts
    store.close()
