"""Casts against PyTorch's own eight-bit floats."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from loadgen.experiments.kv.fp8 import MAX_E4M3, from_fp8, measure_error, to_fp8
from tests.loadgen.experiments.kv.building import random_kv

EDGES = [0.0, -0.0, 1.0625, 1.1875, 447.0, 448.0, -448.0, 460.0, 1e30, -1e30, 2**-6, 2**-9, 2**-10, 2**-11, 3e-3, -1e-8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bytes_are_those_of_pytorch(dtype: torch.dtype) -> None:
    spread = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 3, 20_000)
    given = torch.cat([torch.tensor(EDGES), spread]).to(dtype)
    wanted = given.float().clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)
    numpy_dtype = np.dtype(ml_dtypes.bfloat16) if dtype is torch.bfloat16 else given.numpy().dtype
    array = given.view(torch.uint8).numpy().view(numpy_dtype)
    np.testing.assert_array_equal(to_fp8(array), wanted.numpy())


def test_every_byte_comes_back_as_what_pytorch_says() -> None:
    codes = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(from_fp8(codes, np.dtype(np.float32)), wanted)


def test_error_of_keys_and_of_values_by_layer() -> None:
    """1.0625 is halfway between 1 and 1.125, and goes to the even one; 1.5 is exact; 2**-11 is nearer to 0."""
    kv = np.full((2, 2, 2, 1, 4, 4), 1.5, np.float32)
    kv[:, 1, 0] = 1.0625
    kv[:, :, 1] = 2.0**-11
    kv[0, 0, 1, 0, 0, 0] = 1000.0
    error = measure_error(kv)
    assert error.keys.layers == pytest.approx((0.0, 0.0625 / 1.0625))
    assert error.keys.relative == pytest.approx(math.sqrt(0.0625**2 / (1.5**2 + 1.0625**2)))
    assert (error.keys.clipped, error.keys.zeroed) == (0.0, 0.0)
    assert error.values.layers == pytest.approx((552 / 1000, 1.0), rel=1e-6)
    assert (error.values.clipped, error.values.zeroed) == (1 / 64, 63 / 64)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_error_of_normal_numbers_is_that_of_pytorch(dtype: Any) -> None:
    kv = random_kv(dtype)
    keys = torch.from_numpy(kv[:, :, 0].astype(np.float32))
    rounded = keys.to(torch.float8_e4m3fn).float()
    assert measure_error(kv).keys.relative == pytest.approx(((rounded - keys).norm() / keys.norm()).item(), rel=1e-4)
