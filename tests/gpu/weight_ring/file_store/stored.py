"""A model whose weights are in a file, and what a store says of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from app.domain.errors import WeightsLost
from app.gpu.weight_files.file import BundleFile
from app.gpu.weight_files.header import Section, sections_of
from app.gpu.weight_ring.file_store import FileStore
from tests.gpu.weight_files.bundles import make_model, same_bits

MODEL, OTHER = make_model(), make_model(seed=1)
SECTIONS = {section.name: section for section in sections_of(MODEL.contents)}


def open_store(path: Path, chunk_bytes: int = 1000) -> FileStore:
    return FileStore(BundleFile(path, MODEL.contents), chunk_bytes)


def load(store: FileStore, index: int) -> Tensor:
    target = MODEL.target(index)
    store.load(index, target, ()).synchronize()
    return target


def loads_or_says_so(store: FileStore, index: int) -> bool:
    """Whether the bundle is lost; if it is not, it is right."""
    try:
        assert MODEL.holds(index, load(store, index))
    except WeightsLost:
        return True
    return False


def gathers_or_says_so(store: FileStore, table: int) -> bool:
    """Whether the table is lost; if it is not, its rows are right."""
    ids = torch.arange(len(MODEL.tables[table]))
    try:
        assert same_bits(store.rows(table, ids), MODEL.tables[table])
    except WeightsLost:
        return True
    return False


def all_lost(store: FileStore) -> list[str]:
    """Names of the bundles and tables that are lost; all others are right."""
    bundles = [f"bundle.{index}" for index in range(len(MODEL.bundles)) if loads_or_says_so(store, index)]
    return bundles + [f"table.{index}" for index in range(len(MODEL.tables)) if gathers_or_says_so(store, index)]


def middle(section: Section) -> int:
    return section.offset + section.nbytes // 2
