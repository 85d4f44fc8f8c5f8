"""Products with weights in panels, as any type, in pairs for bfloat16 or in quantized blocks: those of the weights'
values, with the same bits from memory and from a file, alone and in company.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from app.gpu.linear.base import Linear
from app.gpu.linear.cpu.layers import PairLinear, PanelLinear, multiply_as_kept, multiply_in_bfloat16
from app.gpu.linear.cpu.packing import DENSE, PAIRED, to_pairs, to_panels
from app.gpu.linear.cpu.panels import PanelShape, multiply, multiply_from_file
from app.gpu.linear.cpu.tile import ROWS
from app.gpu.linear.cpu.weights import PANEL
from app.gpu.linear.matrix import BlockMatrix, Matrix
from app.gpu.weight_files.layout import host_bytes
from tests.gpu.linear.blocks import EXTREME, HALVES, draw_blocks

KINDS = list(HALVES)
COUNTS = (*range(2 * ROWS + 2), 64)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def kept(kind: str, outputs: int, inputs: int) -> tuple[Tensor, PanelShape]:
    """Random weights in panels, of about so many inputs."""
    if kind == "pairs":
        matrix: Matrix = draw(outputs, 2 * inputs)
    elif kind in KINDS:
        matrix = draw_blocks(kind, outputs, -(-inputs // 32))
    else:
        matrix = draw(outputs, inputs).to(getattr(torch, kind))
    panels, format = to_pairs(matrix) if kind == "pairs" else to_panels(matrix)
    return panels, PanelShape(len(panels), matrix.shape[1], format)


@given(outputs=st.integers(1, 100), inputs=st.integers(1, 30))
def test_a_panel_has_the_weights_of_its_outputs_for_each_input(outputs: int, inputs: int) -> None:
    weight = draw(outputs, inputs)
    panels, _ = to_panels(weight)
    assert panels.is_contiguous()
    for output in range(len(panels) * PANEL):
        found = panels[output // PANEL, :, output % PANEL]
        assert torch.equal(found, weight[output] if output < outputs else torch.zeros(inputs))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "pairs", *KINDS])
def test_panels_are_known_before_the_weights_are_and_are_packed_in_inference_mode_too(kind: str) -> None:
    matrix = draw_blocks(kind, 300, 3) if kind in KINDS else draw(300, 64)
    pack = to_pairs if kind == "pairs" else to_panels
    later = BlockMatrix(kind, matrix.rows.to("meta"), matrix.shape) if isinstance(matrix, BlockMatrix) else None
    found, _ = pack(later or draw(300, 64).to("meta"))
    assert found.is_meta
    panels, _ = pack(matrix)
    assert (found.shape, found.dtype) == (panels.shape, panels.dtype)
    with torch.inference_mode():
        assert torch.equal(pack(matrix)[0], panels)


@pytest.mark.usefixtures("one_thread")  # which puts back how many there were
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "pairs", "Q8_0", "Q4_1", "Q6_K"])
def test_a_product_from_a_file_has_the_bits_of_one_from_memory(kind: str) -> None:
    @given(
        rows=st.integers(0, 3 * ROWS),
        outputs=st.integers(1, 12 * PANEL),
        inputs=st.integers(1, 70),
        offset=st.integers(0, 5000),
        part=st.integers(1, 5),
        threads=st.integers(1, 2),
    )
    def agree(rows: int, outputs: int, inputs: int, offset: int, part: int, threads: int) -> None:
        torch.set_num_threads(threads)
        panels, shape = kept(kind, outputs, inputs)
        shape.part, shape.part_bytes = part, part * shape.panel_bytes
        x = draw(rows, shape.inputs).to(shape.dtype)
        with tempfile.TemporaryFile() as file:
            file.write(bytes(offset) + host_bytes(panels).tobytes())
            file.flush()
            found = multiply_from_file(x, file.fileno(), offset, shape)
            assert found is not None
            assert torch.equal(found, multiply(x, panels, shape))
            os.ftruncate(file.fileno(), offset + panels.nbytes - 1)
            assert multiply_from_file(x, file.fileno(), offset, shape) is None
        assert multiply_from_file(x, -1, 0, shape) is None

    agree()


@given(rows=st.integers(0, 3 * ROWS), outputs=st.integers(1, 5 * PANEL), pairs=st.integers(1, 700))
def test_a_product_is_that_of_the_values(rows: int, outputs: int, pairs: int) -> None:
    """In bfloat16: of the values as that rounds them."""
    x, weight = draw(rows, 2 * pairs), draw(outputs, 2 * pairs)
    y = PanelLinear(weight)(x)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5 * pairs)
    y = PairLinear(weight)(x)
    assert y.dtype is torch.float32
    expected = x.bfloat16().double() @ weight.bfloat16().double().T
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5 * pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_have_the_values_that_gguf_gives_them(kind: str) -> None:
    matrix = draw_blocks(kind, 100, 3, EXTREME)
    expected = matrix.dequantize()
    assert expected.isfinite().all()
    assert torch.equal(PanelLinear(matrix)(torch.eye(matrix.shape[1])).T, expected)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("bfloat16", PanelLinear),
        ("float16", PanelLinear),
        ("Q8_0", PanelLinear),
        ("Q4_1", PanelLinear),
        ("Q4_K", PanelLinear),
        ("Q8_0", PairLinear),
        ("Q4_1", PairLinear),
    ],
)
def test_weights_of_a_smaller_type_give_the_bits_of_float32_weights(kind: str, layer: Callable[..., Linear]) -> None:
    if kind in KINDS:
        matrix: Matrix = draw_blocks(kind, 70, 8)
        values = draw_blocks(kind, 70, 8).dequantize()
    else:
        matrix = draw(70, 33).to(dtype := getattr(torch, kind))
        matrix[0, 0], matrix[1, 0] = torch.finfo(dtype).smallest_normal / 4, -torch.finfo(dtype).max
        values = matrix.float()
    small, whole = layer(matrix), layer(values)
    assert small.weights[0].tensor.nbytes < whole.weights[0].tensor.nbytes
    for rows in COUNTS:
        x = draw(rows, values.shape[1])
        assert torch.equal(small(x), whole(x)), f"{rows} rows"


def test_a_kind_that_no_kernel_reads_becomes_float32() -> None:
    values = np.random.default_rng(0).normal(size=(40, 256)).astype(np.float32)
    rows = gguf.quants.quantize(values, gguf.GGMLQuantizationType.TQ2_0)
    matrix, x = BlockMatrix("TQ2_0", torch.from_numpy(rows), (40, 256)), draw(3, 256)
    assert torch.equal(PanelLinear(matrix)(x), PanelLinear(matrix.dequantize())(x))


@pytest.mark.parametrize("layer", [PanelLinear, PairLinear])
@pytest.mark.parametrize("inputs", [2, 200, 1100])
def test_a_row_has_the_same_bits_in_any_company(layer: Callable[..., Linear], inputs: int) -> None:
    weight, bias, x = draw(70, inputs), draw(70), draw(3 * ROWS + 3, inputs)
    linear = layer(weight, bias)
    whole = linear(x)
    assert torch.equal(whole, layer(weight)(x) + bias), "a bias is added as it is"
    for rows in range(1, len(x) + 1):
        assert torch.equal(linear(x[-rows:]), whole[-rows:]), f"{rows} rows"


def test_what_is_rounded_to_bfloat16() -> None:
    """Inputs for weights of bfloat16 where products are as weights are kept; nothing where there are no pairs."""
    x, weight = draw(4, 32), draw(6, 32)
    assert torch.equal(multiply_as_kept(weight.bfloat16())(x), PairLinear(weight)(x))
    assert torch.equal(multiply_as_kept(weight)(x), PanelLinear(weight)(x))
    assert torch.equal(multiply_as_kept(weight.half())(x), PanelLinear(weight.half())(x))
    assert torch.equal(multiply_in_bfloat16(weight[:, :9])(x[:, :9]), PanelLinear(weight[:, :9])(x[:, :9]))


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 7), torch.zeros(2, 9), torch.zeros(8), torch.zeros(1, 2, 8), torch.zeros(2, 8).double()],
    ids=["narrow", "wide", "vector", "batched", "float64"],
)
def test_what_is_not_rows_of_inputs_is_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"not torch.float32 \[rows, 8\]"):
        multiply(x, to_panels(draw(5, 8))[0], PanelShape(1, 8, DENSE[torch.float32]))
    with pytest.raises(ValueError, match=r"not torch.bfloat16 \[rows, 8\]"):
        multiply(x, to_pairs(draw(5, 8))[0], PanelShape(1, 8, PAIRED))


@given(rows=st.integers(1, 20), first=st.integers(0, 5))
def test_rows_may_lie_anywhere(rows: int, first: int) -> None:
    wide, linear = draw(rows, 40), PanelLinear(draw(70, 20))
    for x in (wide[:, first : first + 20], draw(20, rows).T, draw(1, 20).expand(rows, 20)):
        assert torch.equal(linear(x), linear(x.contiguous()))


@dataclass
class InFile:
    """A place whose bytes are, or are not, what was stored."""

    file: int
    stored: Tensor
    intact: bool = True
    offset: int = 0
    brought: int = 0

    def is_intact(self) -> bool:
        return self.intact

    def bring(self) -> Tensor:
        self.brought += 1
        return self.stored


def test_a_product_of_what_was_not_stored_is_made_again_from_memory(tmp_path: Path) -> None:
    stored, _ = to_panels(draw(70, 20))
    linear, x = PanelLinear(torch.empty(70, 20, device="meta")), draw(3, 20)
    [weight] = linear.weights
    (tmp_path / "weight").write_bytes(torch.zeros_like(stored).numpy().tobytes())
    with (tmp_path / "weight").open("rb") as file:
        weight.place = place = InFile(file.fileno(), stored)
        assert not linear(x).any(), "it is read where it is"
        assert place.brought == 0
        place.intact = False
        for _ in range(2):
            assert torch.equal(linear(x), PanelLinear(draw(70, 20))(x))
        assert place.brought == 1, "it is in memory now"
