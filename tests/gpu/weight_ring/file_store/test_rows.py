"""Rows of tables are gathered from the file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import app.gpu.weight_files.file
from app.gpu.weight_files.file import BundleFile, FileState
from app.gpu.weight_ring.file_store import FileStore
from tests.gpu.weight_files.bundles import same_bits
from tests.gpu.weight_ring.file_store.stored import MODEL


@pytest.mark.parametrize("ids", [[], [3], [0, 39], [7, 7, 7], [4, 5, 6, 0, 39, 5]])
def test_rows_are_gathered_in_the_order_they_are_asked_for(store: FileStore, ids: list[int]) -> None:
    wanted = torch.tensor(ids, dtype=torch.int64)
    assert same_bits(store.rows(0, wanted), MODEL.tables[0][wanted])
    few = wanted % 9
    assert same_bits(store.rows(1, few), MODEL.tables[1][few])


@pytest.mark.parametrize("row", [-1, 40])
def test_a_row_that_is_not_there_is_not_read_from_next_door(store: FileStore, row: int) -> None:
    with pytest.raises(IndexError, match="40 rows"):
        store.rows(0, torch.tensor([0, row]))


@pytest.mark.parametrize("part_bytes", [7, 1 << 20])
def test_rows_of_a_file_whose_times_never_stand_still_are_found(
    path: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """All of the table is read for them each time, in parts that cut rows anywhere."""
    monkeypatch.setattr(app.gpu.weight_files.file, "_SCRATCH_BYTES", part_bytes)
    state = BundleFile.state

    def touch(file: BundleFile) -> FileState:
        os.utime(path, ns=(0, time.monotonic_ns()))
        return state(file)

    monkeypatch.setattr(BundleFile, "state", touch)
    ids = torch.tensor([39, 0, 7, 7, 20])
    for table, matrix in enumerate(MODEL.tables):
        known = ids[ids < len(matrix)]
        assert same_bits(store.rows(table, known), matrix[known])
