"""Bundles and tables with content that is made up, of every awkward size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.gpu.weights.file import WeightFile, open_weight_file
from app.gpu.weights.layout import BundleLayout, Piece, WeightLayout, Write, sections_of


@dataclass(frozen=True)
class Model:
    """The tensors of each bundle, and the tables."""

    bundles: Sequence[Sequence[Tensor]]
    tables: Sequence[Tensor]
    name: str = "model-a"

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout(
            [BundleLayout.of(tensors) for tensors in self.bundles],
            [Piece(tuple(table.shape), table.dtype, 0) for table in self.tables],
        )

    @property
    def sections(self) -> dict[str, Piece]:
        return sections_of(self.name, self.layout)[0]

    def fill(self, write: Write) -> None:
        for index, matrix in enumerate(self.tables):
            write(f"table.{index}", [matrix])
        for number, tensors in enumerate(self.bundles):
            write(f"bundle.{number}", tensors)

    def write(self, path: Path) -> WeightFile:
        return open_weight_file(path, self.name, self.layout, self.fill)

    def target(self, index: int) -> Tensor:
        """Memory for a bundle, of which every byte is something else than zero."""
        return torch.full((self.layout.bundles[index].nbytes,), 0xA5, dtype=torch.uint8)

    def holds(self, index: int, memory: Tensor) -> bool:
        """Whether `memory` holds bundle `index`, bit for bit."""
        views = self.layout.bundles[index].views(memory)
        return all(map(same_bits, views, self.bundles[index]))


def make_model(seed: int = 0) -> Model:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return Model(
        bundles=[
            [normal(30, 50), normal(7, dtype=torch.bfloat16), normal(3)],  # pages and a rest
            [normal(64, 64)],  # pages
            [],
            [normal(0, 8), normal(5)],  # less than a page
        ],
        tables=[normal(40, 24), normal(9, 3, dtype=torch.bfloat16)],
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(_bits(one), _bits(other))


def overwrite(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def _bits(tensor: Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8)
