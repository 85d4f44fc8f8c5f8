"""Weights in quantized blocks: the very values that gguf gives them, and the products of these values in float32."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from app.gpu.cpu.compile import c_function
from app.gpu.cpu.intrinsics import pointer
from app.gpu.linear.cpu.layers import PanelLinear
from app.gpu.linear.cpu.packing import to_panels
from app.gpu.linear.cpu.panels import PanelShape, multiply, multiply_from_file
from app.gpu.linear.cpu.tile import unpack
from app.gpu.linear.cpu.weights import PANEL
from app.gpu.linear.matrix import BlockMatrix
from tests.gpu.linear.blocks import EXTREME, HALVES, draw_blocks

KINDS = list(HALVES)
QUICK = ("Q8_0", "Q4_1", "Q4_K")
"""Whose products `make test` looks at: the kernel of each kind takes seconds to compile."""


class _Arguments(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_int64) for name in ("weight", "panels", "panel_bytes", "inputs", "out")]


_ARGUMENTS = np.dtype(_Arguments)


def unpacking(element: Any) -> Callable[[int], None]:
    def kernel(address: int) -> None:
        a = carray(pointer(address), 1, _ARGUMENTS)[0]
        for panel in range(a.panels):
            unpack(element, a.weight + panel * a.panel_bytes, a.inputs, a.out + panel * a.inputs * PANEL * 4)

    return kernel


def values_of(matrix: BlockMatrix) -> Tensor:
    """`[out, in]` float32, as the kernels read them from panels."""
    outputs, inputs = matrix.shape
    panels, format = to_panels(matrix)
    out = torch.empty(len(panels), inputs, PANEL)
    arguments = _Arguments(panels.data_ptr(), len(panels), panels.shape[1], inputs, out.data_ptr())
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(c_function(unpacking(format.element)).address)
    function(ctypes.addressof(arguments))
    return out.transpose(1, 2).reshape(-1, inputs)[:outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_bits_that_gguf_gives_them(kind: str) -> None:
    matrix = draw_blocks(kind, 300, 3, EXTREME)
    expected = matrix.dequantize()
    assert expected.isfinite().all()
    assert torch.equal(values_of(matrix).view(torch.int32), expected.view(torch.int32))


def test_they_are_packed_in_inference_mode_too() -> None:
    matrix = draw_blocks("Q4_1", 300, 3)
    with torch.inference_mode():
        panels, _ = to_panels(matrix)
        assert torch.equal(panels, to_panels(matrix)[0])
    assert torch.equal(panels, to_panels(matrix)[0])


@pytest.mark.parametrize(
    "kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind not in QUICK)]
)
@pytest.mark.parametrize(("outputs", "blocks"), [(100, 1), (64, 7)])
def test_products_have_the_bits_of_float32_weights(kind: str, outputs: int, blocks: int) -> None:
    matrix = draw_blocks(kind, outputs, blocks)
    values = matrix.dequantize()
    packed, whole = PanelLinear(matrix), PanelLinear(values)
    assert packed.weights[0].tensor.nbytes * 2.5 < whole.weights[0].tensor.nbytes
    for rows in (*range(24), 64, 300):
        x = torch.randn(rows, values.shape[1], generator=torch.Generator().manual_seed(rows))
        assert torch.equal(packed(x), whole(x)), f"{rows} rows"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_products_from_a_file_have_the_bits_of_those_from_memory(kind: str, tmp_path: Path) -> None:
    matrix = draw_blocks(kind, 700, 2)
    panels, format = to_panels(matrix)
    shape = PanelShape(len(panels), matrix.shape[1], format)
    (tmp_path / "weight").write_bytes(bytes(100) + panels.numpy().tobytes())
    with (tmp_path / "weight").open("rb") as file:
        for rows in (1, 3, 30):
            x = torch.randn(rows, matrix.shape[1], generator=torch.Generator().manual_seed(rows))
            found = multiply_from_file(x, file.fileno(), 100, shape)
            assert found is not None
            assert torch.equal(found, multiply(x, panels, shape))


@pytest.mark.parametrize("kind", KINDS)
def test_panels_of_blocks_are_known_before_the_weights_are(kind: str) -> None:
    matrix = draw_blocks(kind, 70, 2)
    panels, _ = to_panels(BlockMatrix(kind, matrix.rows.to("meta"), matrix.shape))
    assert panels.is_meta
    assert (panels.shape, panels.dtype) == (to_panels(matrix)[0].shape, torch.uint8)


def test_a_kind_that_no_kernel_reads_becomes_float32() -> None:
    values = np.random.default_rng(0).normal(size=(40, 256)).astype(np.float32)
    rows = gguf.quants.quantize(values, gguf.GGMLQuantizationType.TQ2_0)
    matrix = BlockMatrix("TQ2_0", torch.from_numpy(rows), (40, 256))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(PanelLinear(matrix)(x), PanelLinear(matrix.dequantize())(x))
