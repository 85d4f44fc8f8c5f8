"""Matrices in blocks have the values that gguf gives them, however they are joined."""

import gguf
import numpy as np
import pytest
import torch

from app.gpu.linear.matrix import BlockMatrix, dense_of, stack

KINDS = ["Q4_0", "Q4_1", "Q8_0"]


def blocks(kind: str, rows: int, inputs: int, seed: int) -> BlockMatrix:
    values = np.random.default_rng(seed).normal(size=(rows, inputs)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return BlockMatrix(kind, torch.from_numpy(packed), (rows, inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_blocks_have_the_values_of_the_whole(kind: str) -> None:
    matrix = blocks(kind, 10, 64, seed=1)
    assert torch.equal(matrix.dequantize(torch.tensor([7, 0, 7])), matrix.dequantize()[[7, 0, 7]])


@pytest.mark.parametrize("kinds", [("Q4_1", "Q4_1"), ("Q4_1", "Q8_0")])
def test_joined_blocks_keep_their_values(kinds: tuple[str, str]) -> None:
    parts = [blocks(kind, 4, 32, seed) for seed, kind in enumerate(kinds)]
    joined = stack(parts)
    assert isinstance(joined, BlockMatrix) == (kinds[0] == kinds[1])
    assert torch.equal(dense_of(joined), torch.cat([part.dequantize() for part in parts]))


def test_tensors_of_one_type_keep_it() -> None:
    halves = [torch.randn(2, 8).bfloat16(), torch.randn(3, 8).bfloat16()]
    assert torch.equal(dense_of(stack(halves)), torch.cat(halves))
    mixed = dense_of(stack([halves[0], torch.ones(1, 8)]))
    assert mixed.dtype is torch.float32
