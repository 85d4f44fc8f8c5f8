"""Products with weights in panels: the same bits from memory and from a file, alone and in company."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.domain.errors import WeightsLost
from app.gpu.linear.cpu.layers import PanelLinear
from app.gpu.linear.cpu.packing import DENSE
from app.gpu.linear.cpu.packing import to_panels as pack
from app.gpu.linear.cpu.panels import PanelShape, multiply, multiply_from_file
from app.gpu.linear.cpu.tile import ROWS
from app.gpu.linear.cpu.weights import PANEL
from app.gpu.linear.weight import Weight
from app.gpu.weight_files.layout import host_bytes


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def to_panels(weight: Tensor) -> Tensor:
    return pack(weight)[0]


def shape_of(panels: Tensor) -> PanelShape:
    return PanelShape(panels.shape[0], panels.shape[1], DENSE[panels.dtype])


@given(outputs=st.integers(1, 100), inputs=st.integers(1, 30))
def test_a_panel_has_the_weights_of_its_outputs_for_each_input(outputs: int, inputs: int) -> None:
    weight = draw(outputs, inputs)
    panels = to_panels(weight)
    assert panels.is_contiguous()
    assert to_panels(weight.to("meta")).shape == panels.shape
    for output in range(len(panels) * PANEL):
        found = panels[output // PANEL, :, output % PANEL]
        assert torch.equal(found, weight[output] if output < outputs else torch.zeros(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_from_a_file_has_the_bits_of_one_from_memory(
    threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    @settings(max_examples=60)
    @given(
        rows=st.integers(0, 3 * ROWS),
        outputs=st.integers(1, 12 * PANEL),
        inputs=st.integers(1, 70),
        offset=st.integers(0, 5000),
        part_bytes=st.integers(1, 1 << 16),
    )
    def agree(rows: int, outputs: int, inputs: int, offset: int, part_bytes: int) -> None:
        monkeypatch.setattr("app.gpu.linear.cpu.panels.PART_BYTES", part_bytes)
        x, weight = draw(rows, inputs), draw(outputs, inputs).to(dtype)
        panels = to_panels(weight)
        y = multiply(x, panels, shape_of(panels))
        torch.testing.assert_close(y[:, :outputs].double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
        with tempfile.TemporaryFile() as file:
            file.write(bytes(offset) + host_bytes(panels).tobytes())
            file.flush()
            found = multiply_from_file(x, file.fileno(), offset, shape_of(panels))
            assert found is not None
            assert torch.equal(found, y)
            os.ftruncate(file.fileno(), offset + panels.nbytes - 1)
            assert multiply_from_file(x, file.fileno(), offset, shape_of(panels)) is None

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        agree()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 33), (32, 1), (200, 1300)])
def test_weights_of_a_half_type_give_the_bits_of_float32_weights(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight = draw(outputs, inputs).to(dtype)
    weight[0, 0], weight[1, 0] = torch.finfo(dtype).smallest_normal / 4, -torch.finfo(dtype).max
    half, whole = PanelLinear(weight), PanelLinear(weight.float())
    assert half.weights[0].tensor.nbytes * 2 == whole.weights[0].tensor.nbytes
    for rows in (*range(40), 64, 300):
        x = draw(rows, inputs)
        assert torch.equal(half(x), whole(x)), f"{rows} rows"


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 7), torch.zeros(2, 9), torch.zeros(8), torch.zeros(1, 2, 8), torch.zeros(2, 8).double()],
    ids=["narrow", "wide", "vector", "batched", "float64"],
)
def test_what_is_not_rows_of_inputs_is_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"not torch.float32 \[rows, 8\]"):
        multiply(x, to_panels(draw(5, 8)), PanelShape(1, 8, DENSE[torch.float32]))


@given(rows=st.integers(1, 20), first=st.integers(0, 5))
def test_rows_may_lie_anywhere(rows: int, first: int) -> None:
    wide, weight = draw(rows, 40), to_panels(draw(70, 20))
    columns = draw(20, rows).T
    for x in (wide[:, first : first + 20], columns, draw(1, 20).expand(rows, 20)):
        assert torch.equal(multiply(x, weight, shape_of(weight)), multiply(x.contiguous(), weight, shape_of(weight)))


def test_another_default_type_changes_nothing() -> None:
    x, weight = draw(3, 20), to_panels(draw(70, 20))
    expected = multiply(x, weight, shape_of(weight))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(multiply(x, weight, shape_of(weight)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_file_that_cannot_be_read_has_no_product() -> None:
    assert multiply_from_file(draw(1, 8), -1, 0, PanelShape(1, 8, DENSE[torch.float32])) is None


@given(rows=st.integers(1, 3 * ROWS), first=st.integers(0, 3 * ROWS), count=st.integers(1, 3 * ROWS))
def test_a_row_has_the_same_bits_in_any_batch(rows: int, first: int, count: int) -> None:
    x, linear = draw(rows, 200), PanelLinear(draw(70, 200))
    assert torch.equal(linear(x[first : first + count]), linear(x)[first : first + count])


@dataclass
class InFile:
    """A place whose bytes are, or are not, what was stored."""

    file: int
    intact: bool
    stored: Tensor
    offset: int = 0
    brought: int = 0
    lost: bool = False

    def is_intact(self) -> bool:
        return self.intact

    def bring(self) -> Tensor:
        self.brought += 1
        if self.lost:
            raise WeightsLost("gone")
        return self.stored


@pytest.fixture
def spoilt(tmp_path: Path) -> Iterator[InFile]:
    """A file that has not what was stored."""
    stored = to_panels(draw(70, 20))
    (tmp_path / "weight").write_bytes(torch.zeros_like(stored).numpy().tobytes())
    with (tmp_path / "weight").open("rb") as file:
        yield InFile(file.fileno(), intact=True, stored=stored)


def layer_in(place: InFile) -> tuple[PanelLinear, Weight]:
    linear = PanelLinear(torch.empty(70, 20, device="meta"))
    [weight] = linear.weights
    weight.place = place
    return linear, weight


def test_what_is_read_where_it_is_comes_to_no_memory(spoilt: InFile) -> None:
    linear, _ = layer_in(spoilt)
    assert not linear(draw(3, 20)).any()
    assert spoilt.brought == 0


def test_a_product_of_what_was_not_stored_is_made_again_from_memory(spoilt: InFile) -> None:
    spoilt.intact = False
    (linear, weight), x = layer_in(spoilt), draw(3, 20)
    expected = PanelLinear(draw(70, 20))(x)
    assert torch.equal(linear(x), expected)
    assert torch.equal(linear(x), expected)
    assert spoilt.brought == 1, "it is in memory now"
    del weight.tensor
    with pytest.raises(AttributeError):
        linear(x)


def test_a_product_of_what_is_lost_is_an_error(spoilt: InFile) -> None:
    spoilt.intact, spoilt.lost = False, True
    linear, _ = layer_in(spoilt)
    for _ in range(2):
        with pytest.raises(WeightsLost):
            linear(draw(3, 20))
