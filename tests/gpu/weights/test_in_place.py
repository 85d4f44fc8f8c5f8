"""Bundles that are used where they are, in a file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.domain.errors import WeightsLost
from app.gpu.device.streams import PASSED, CpuStreams
from app.gpu.kernels.linear.base import Linear, Weight
from app.gpu.kernels.linear.formats import to_panels
from app.gpu.kernels.linear.panels import PanelLinear
from app.gpu.weights.arena import lay_out, plan_weights
from app.gpu.weights.bundles import StreamedWeights
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
        with pytest.raises(WeightsLost, match="closed"):
            _ = lost.tensor
    with pytest.raises(WeightsLost, match="closed"):
        multiply(weight)


NUMBERS = [torch.full((64, 48), 1.0 + index) for index in range(6)]
NUMBERED = Model([[each.view(-1)[:256], to_panels(each)[0]] for each in NUMBERS], [])
ONES = torch.ones(1, 48)


@pytest.mark.usefixtures("exact_clock")
def test_bundles_pass_through_two_slots_and_the_next_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six bundles of a norm and a layer, whose numbers are 1 to 6: copied in the first pass, used in the file then."""
    store, asked = FileStore(NUMBERED.write(tmp_path / "model.safetensors")), list[str]()

    def note(_: WeightFile, name: str) -> bool:
        asked.append(name)
        return True

    weights = StreamedWeights(ONES.device, torch.float32, PanelLinear)
    norms, layers = list[Weight](), list[Linear]()
    for tensors in NUMBERED.bundles:
        with weights.bundle() as bundle:
            norms.append(bundle.hold(tensors[0].to("meta")))
            layers.append(bundle.linear(torch.empty(64, 48, device="meta")))
    assert weights.layout == NUMBERED.layout
    monkeypatch.setattr(WeightFile, "is_cached", note)
    sizes = [bundle.nbytes for bundle in NUMBERED.layout.bundles]
    plan = plan_weights(sizes, 2 * sizes[0], from_disk=True)
    weights.stream_from(store, CpuStreams(), plan)
    arena = lay_out(plan, 0, 1)
    memory = torch.zeros(arena.nbytes, dtype=torch.uint8)
    weights.place(memory, arena)
    for number in range(2):
        before = memory.clone()
        for index in range(6):
            assert asked[-1] == f"bundle.{(index + 1) % 6}"
            with weights.using(index):
                assert torch.equal(layers[index](ONES), torch.full((1, 64), 48.0 * (index + 1)))
                if number == 0:
                    assert torch.equal(norms[index].tensor, torch.full((256,), index + 1.0))
        assert torch.equal(memory, before) == (number == 1)
    weights.close()


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
