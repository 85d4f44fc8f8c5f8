"""Rows of a table in quantized blocks, which come from the file as they are and become numbers when they are there."""

from __future__ import annotations

from pathlib import Path

import torch

from app.gpu.linear.matrix import BlockMatrix
from app.gpu.weight_ring.file_store import FileStore
from app.gpu.weight_ring.host_table import HostTable
from tests.gpu.linear.blocks import draw_blocks
from tests.gpu.weight_files.bundles import Model


def test_rows_of_blocks_have_the_values_of_the_whole(tmp_path: Path) -> None:
    matrix = draw_blocks("Q8_0", 50, 2)
    store = FileStore(Model([[torch.ones(4)]], [matrix.rows]).write(tmp_path / "model.safetensors"), 1 << 20)
    known = BlockMatrix("Q8_0", matrix.rows.to("meta"), matrix.shape)
    table = HostTable(store, 0, known, torch.device("cpu"), torch.float32)
    ids = torch.tensor([7, 49, 0, 7])
    assert torch.equal(table.rows(ids), matrix.dequantize()[ids])
    store.close()
