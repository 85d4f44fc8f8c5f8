"""A CPU's layers against the product in float64. A row's bits depend on no other row, nor on where weights lie. Blocks
have the values of gguf.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from app.gpu.kernels.cpu.tiles import PANEL, ROWS
from app.gpu.kernels.linear import linear_maker
from app.gpu.kernels.linear.base import BlockMatrix, FilePlace, Linear, MatmulPrecision, Matrix, dense_of
from app.gpu.kernels.linear.encodings import FLOAT8, INT8, dequantize, float8_parts, quantize
from app.gpu.kernels.linear.formats import to_panels
from app.gpu.kernels.linear.panels import PanelLinear
from app.gpu.weights.layout import host_bytes
from tests.gpu.kernels.linear.blocks import EXTREME, GROUPED, HALVES, draw_blocks, draw_groups

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = [(1, 1), (7, 5), (96, 64), (576, 1536)]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


PairLinear = partial(PanelLinear, in_bfloat16=True)


def make(weight: Tensor, bias: Tensor | None = None, *, streamed: bool = False) -> Linear:
    """The layer of a weight that stays, or of one that has come after the layer was made."""
    maker = linear_maker(CPU, weight.dtype, batch_invariant=False)
    made = maker(weight, bias, 1)
    if not streamed:
        return made
    linear = maker(weight.to("meta"), None if bias is None else bias.to("meta"), 1)
    for cell, came in zip(linear.weights, made.weights, strict=True):
        assert cell.tensor.shape == came.tensor.shape
        cell.tensor = came.tensor
    return linear


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@torch.inference_mode()
def test_a_product_and_the_bits_of_a_streamed_weight(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = draw(outputs, inputs, dtype=dtype)
    for bias in (None, draw(outputs, dtype=dtype)):
        stays, streamed = (make(weight, bias, streamed=each) for each in (False, True))
        assert (stays.in_features, stays.out_features) == (streamed.in_features, streamed.out_features)
        assert (stays.in_features, stays.out_features) == (inputs, outputs)
        for tokens in (0, 1, 2, 3, 8, 15, 16, 17, 33, 100):
            x = draw(tokens, inputs, dtype=dtype)
            y = stays(x)
            expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            assert y.dtype == dtype
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * inputs**0.5)
            assert torch.equal(streamed(x), y), f"{tokens} tokens"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    for outputs, inputs in SHAPES[1::2]:
        x, linear = draw(70, inputs, dtype=dtype), make(draw(outputs, inputs, dtype=dtype), draw(outputs, dtype=dtype))
        alone = torch.cat([linear(row[None]) for row in x])
        for batch, first in ((2, 7), (3, 0), (8, 61), (16, 5), (17, 30), (33, 11), (70, 0)):
            assert torch.equal(linear(x[first : first + batch]), alone[first : first + batch]), batch


def draw_uneven(rows: int, inputs: int) -> Tensor:
    """Rows of very different sizes, one of zeros, and blocks whose numbers lie halfway between integers."""
    values = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows + inputs))
    values *= torch.logspace(-6, 4, rows)[:, None]
    values[0] = 0
    values[-1] = torch.arange(inputs) % 128 - 63.5
    values[-1, ::32] = 127
    return values


def blocks(kind: str, values: Tensor) -> BlockMatrix:
    if kind in (INT8, FLOAT8):
        rows = quantize(kind, values)
    else:
        rows = torch.from_numpy(gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind]))
    return BlockMatrix(kind, rows, (values.shape[0], values.shape[1]))


@pytest.mark.parametrize("shape", [(3, 32), (40, 96), (5000, 64)])
def test_integers_are_those_of_gguf(shape: tuple[int, int]) -> None:
    values, kind = draw_uneven(*shape), gguf.GGMLQuantizationType.Q8_0
    rows = quantize(INT8, values)
    assert torch.equal(rows, torch.from_numpy(gguf.quants.quantize(values.numpy(), kind)))
    assert torch.equal(dequantize(INT8, rows), torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind)))


def test_a_number_becomes_the_nearest_float8() -> None:
    values = draw_uneven(40, 96)
    numbers, scales = float8_parts(quantize(FLOAT8, values))
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = grid[grid.isfinite()]
    for row, found, scale in zip(values.double(), numbers.double(), scales.double(), strict=True):
        assert torch.equal((row - found * scale).abs(), (row[:, None] - grid * scale).abs().min(1).values)


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_a_row_with_a_number_that_is_not_finite_is_not_a_number(odd: float) -> None:
    values = torch.tensor([[1.0, odd], [1.0, 2.0]])
    found = dequantize(FLOAT8, quantize(FLOAT8, values.repeat(1, 8)))
    assert found[0].isnan().all()
    assert torch.equal(found[1], values[1].repeat(8))


KINDS = list(HALVES)
COUNTS = (*range(2 * ROWS + 2), 64)


def kept(kind: str, outputs: int, inputs: int) -> PanelLinear:
    """Random weights in panels, of about so many inputs."""
    if kind == "pairs":
        return PairLinear(draw(outputs, 2 * inputs))
    if kind in GROUPED:
        return PanelLinear(draw_groups(kind, outputs, inputs))
    if kind in KINDS:
        return PanelLinear(draw_blocks(kind, outputs, -(-inputs // 32)))
    return PanelLinear(draw(outputs, inputs).to(getattr(torch, kind)))


@dataclass
class InFile:
    """A place in a file, which changes as soon as anybody has asked whether it still has what was `stored` there."""

    file: int
    stored: Tensor
    intact: bool = True
    offset: int = 0
    brought: int = 0

    @property
    def place(self) -> FilePlace:
        return FilePlace(self.file, self.offset, self.stored.nbytes, self.is_intact, self.bring)

    def is_intact(self) -> bool:
        os.pwrite(self.file, host_bytes(self.stored).tobytes(), 0)
        return self.intact

    def bring(self) -> Tensor:
        self.brought += 1
        return self.stored


@pytest.mark.usefixtures("one_thread")  # which puts back how many there were
@pytest.mark.parametrize("kind", ["float32", "pairs", "Q6_K", "NVFP4"])
@given(
    rows=st.integers(0, 3 * ROWS),
    outputs=st.integers(1, 12 * PANEL),
    inputs=st.integers(1, 70),
    offset=st.integers(0, 5000),
    part=st.integers(1, 5),
    threads=st.integers(1, 2),
)
def test_a_product_from_a_file_has_the_bits_of_one_from_memory(
    kind: str, rows: int, outputs: int, inputs: int, offset: int, part: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    linear = kept(kind, outputs, inputs)
    linear._part = part
    [weight] = linear.weights
    panels, x = weight.tensor, draw(rows, linear.in_features)
    expected = linear(x)
    with tempfile.TemporaryFile() as file:
        file.write(bytes(offset) + host_bytes(panels).tobytes())
        file.flush()
        whole = InFile(file.fileno(), panels, offset=offset)
        weight.place = whole.place
        assert torch.equal(linear(x), expected)
        os.ftruncate(file.fileno(), offset + panels.nbytes - 1)
        assert whole.brought == 0
        assert torch.equal(linear(x), expected)
        assert whole.brought == 1, "a short file is not used"
    closed = InFile(-1, panels)
    weight.place = closed.place
    assert torch.equal(linear(x), expected)
    assert closed.brought == 1


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


@pytest.mark.parametrize("kind", [*KINDS, *GROUPED])
def test_blocks_have_the_values_that_gguf_gives_them(kind: str) -> None:
    """And groups those of PyTorch's types."""
    matrix = draw_groups(kind, 100, 1536) if kind in GROUPED else draw_blocks(kind, 100, 3, EXTREME)
    expected = matrix.dequantize()
    assert expected.isfinite().all()
    assert torch.equal(PanelLinear(matrix)(torch.eye(matrix.shape[1])).T, expected)
    assert matrix.scales.isfinite().all()
    for broken, first in enumerate(HALVES.get(kind, ()), 1):
        matrix.rows[-1].view(3, -1)[-1, first : first + 2] = 255
        assert (~matrix.scales.isfinite()).sum() == broken


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
        *((kind, PanelLinear) for kind in GROUPED),
        ("float8", PairLinear),
    ],
)
def test_weights_of_a_smaller_type_give_the_bits_of_float32_weights(kind: str, layer: Callable[..., Linear]) -> None:
    if kind in KINDS or kind in GROUPED:
        matrix: Matrix = draw_groups(kind, 70, 1024) if kind in GROUPED else draw_blocks(kind, 70, 8)
        values = dense_of(matrix)
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
    as_kept, rounding = (
        linear_maker(CPU, torch.float32, batch_invariant=False, products=products)
        for products in (MatmulPrecision.AS_KEPT, MatmulPrecision.BFLOAT16)
    )
    x, weight = draw(4, 32), draw(6, 32)
    assert torch.equal(as_kept(weight.bfloat16(), None, 1)(x), PairLinear(weight)(x))
    assert torch.equal(as_kept(weight, None, 1)(x), PanelLinear(weight)(x))
    assert torch.equal(as_kept(weight.half(), None, 1)(x), PanelLinear(weight.half())(x))
    assert torch.equal(rounding(weight, None, 1)(x), PairLinear(weight)(x))
    assert torch.equal(rounding(weight[:, :9], None, 1)(x[:, :9]), PanelLinear(weight[:, :9])(x[:, :9]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("products", MatmulPrecision)
def test_half_types_are_summed_in_float32_and_rounded_once(dtype: torch.dtype, products: MatmulPrecision) -> None:
    x, weight, bias = (draw(*shape, dtype=dtype) for shape in ((20, 64), (40, 64), (40,)))
    found = linear_maker(CPU, dtype, batch_invariant=False, products=products)(weight, bias, 1)(x)
    in_bfloat16 = products is MatmulPrecision.BFLOAT16 or (
        products is MatmulPrecision.AS_KEPT and dtype is torch.bfloat16
    )
    assert torch.equal(found, PanelLinear(weight, bias, in_bfloat16=in_bfloat16)(x.float()).to(dtype))


@given(rows=st.integers(1, 20), first=st.integers(0, 5), streamed=st.booleans())
def test_rows_may_lie_anywhere(rows: int, first: int, streamed: bool) -> None:
    weight, wide = draw(70, 20), draw(rows, 40)
    panels = PanelLinear(weight)
    for x in (wide[:, first : first + 20], draw(20, rows).T, draw(1, 20).expand(rows, 20)):
        assert torch.equal(panels(x), panels(x.contiguous()))
    half, x = make(weight.bfloat16(), streamed=streamed), wide.bfloat16()[:, first : first + 20]
    assert torch.equal(half(x), half(x.contiguous()))


def test_a_product_of_what_was_not_stored_is_made_again_from_memory() -> None:
    stored, _ = to_panels(draw(70, 20))
    linear, x = PanelLinear(torch.empty(70, 20, device="meta")), draw(3, 20)
    [weight] = linear.weights
    with tempfile.TemporaryFile() as file:
        file.write(bytes(stored.nbytes))
        file.flush()
        place = InFile(file.fileno(), stored)
        weight.place = place.place
        assert not linear(x).any(), "it is read where it is, before it is looked at"
        assert place.brought == 0
        place.intact = False
        for _ in range(2):
            assert torch.equal(linear(x), PanelLinear(draw(70, 20))(x))
        assert place.brought == 1, "it is in memory now"
