"""Products in bfloat16: near the exact ones of rounded values, and the same bits in any company and from a file."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.gpu.linear.cpu.layers import PairLinear, PanelLinear, multiply_as_kept, multiply_in_bfloat16
from app.gpu.linear.cpu.packing import PAIRED, to_pairs
from app.gpu.linear.cpu.panels import PanelShape, multiply, multiply_from_file
from app.gpu.linear.cpu.tile import ROWS
from app.gpu.linear.cpu.weights import PANEL
from app.gpu.weight_files.layout import host_bytes
from tests.gpu.linear.blocks import draw_blocks


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.bfloat16().double() @ weight.bfloat16().double().T


@settings(max_examples=60)
@given(rows=st.integers(0, 3 * ROWS), outputs=st.integers(1, 5 * PANEL), pairs=st.integers(1, 700))
def test_a_product_is_that_of_the_rounded_values(rows: int, outputs: int, pairs: int) -> None:
    x, weight = draw(rows, 2 * pairs), draw(outputs, 2 * pairs)
    y = PairLinear(weight)(x)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y.double(), exact(x, weight), rtol=1e-5, atol=1e-5 * pairs)


@pytest.mark.parametrize("inputs", [2, 64, 1100])
def test_a_row_has_the_same_bits_in_any_company(inputs: int) -> None:
    layer, x = PairLinear(draw(70, inputs), draw(70)), draw(5 * ROWS + 3, inputs)
    whole = layer(x)
    for rows in range(1, len(x) + 1):
        assert torch.equal(layer(x[-rows:]), whole[-rows:]), f"{rows} rows"


@given(rows=st.integers(1, 2 * ROWS), outputs=st.integers(1, 9 * PANEL), pairs=st.integers(1, 40))
def test_a_product_from_a_file_has_the_bits_of_one_from_memory(rows: int, outputs: int, pairs: int) -> None:
    x, panels = draw(rows, 2 * pairs).bfloat16(), to_pairs(draw(outputs, 2 * pairs))[0]
    assert to_pairs(draw(outputs, 2 * pairs).to("meta"))[0].shape == panels.shape
    shape = PanelShape(len(panels), 2 * pairs, PAIRED)
    with tempfile.TemporaryFile() as file:
        file.write(host_bytes(panels).tobytes())
        file.flush()
        found = multiply_from_file(x, file.fileno(), 0, shape)
    assert found is not None
    assert torch.equal(found, multiply(x, panels, shape))


def test_a_bias_is_added_as_it_is() -> None:
    x, weight, bias = draw(3, 8), draw(5, 8), draw(5)
    assert torch.equal(PairLinear(weight, bias)(x), PairLinear(weight)(x) + bias)


def test_x_that_is_not_rounded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not torch.bfloat16 \[rows, 8\]"):
        multiply(torch.zeros(2, 8), to_pairs(draw(5, 8))[0], PanelShape(1, 8, PAIRED))


def test_odd_inputs_are_multiplied_in_float32() -> None:
    x, weight = draw(3, 9), draw(5, 9)
    torch.testing.assert_close(multiply_in_bfloat16(weight)(x), x @ weight.T)


def test_as_kept_rounds_inputs_for_weights_of_bfloat16_only() -> None:
    x, weight = draw(4, 32), draw(6, 32)
    assert torch.equal(multiply_as_kept(weight.bfloat16())(x), PairLinear(weight)(x))
    assert torch.equal(multiply_as_kept(weight)(x), PanelLinear(weight)(x))
    assert torch.equal(multiply_as_kept(weight.half())(x), PanelLinear(weight.half())(x))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_blocks_give_the_bits_of_their_rounded_values(kind: str) -> None:
    blocks = draw_blocks(kind, 70, 40)
    packed, dense = PairLinear(blocks), PairLinear(blocks.dequantize())
    assert packed.weights[0].tensor.nbytes < dense.weights[0].tensor.nbytes
    for rows in (*range(1, 20), 33, 64):
        x = draw(rows, blocks.shape[1])
        assert torch.equal(packed(x), dense(x)), f"{rows} rows"
