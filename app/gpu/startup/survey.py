"""How large the parts of a model's weights are, found without reading one of them."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from app.gpu.kernels.attention.base import Attention
from app.gpu.kernels.linear.base import MakeLinear
from app.gpu.kernels.linear.matrix import Matrix
from app.gpu.models import build_stack
from app.gpu.weights.fill import FillText
from app.gpu.weights.form import nbytes_of
from app.gpu.weights.layout import BundleLayout, Piece
from app.gpu.weights.source import WeightSource, weights_of
from app.model_store.resolve import ResolvedModel


class MetaWeights:
    """A `WeightSource` of tensors on `meta`: they have a shape, and take no memory."""

    def __init__(self, stored: WeightSource, dtype: torch.dtype) -> None:
        """`stored` says which tensors there are; none is taken of it."""
        self.nbytes = 0
        self._stored = stored
        self._dtype = dtype

    def holds(self, name: str) -> bool:
        return self._stored.holds(name)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightSource.take`. Whether the tensor is there, and has that shape, is seen when it is read."""
        tensor = torch.empty(shape, dtype=self._dtype, device="meta")
        self.nbytes += tensor.nbytes
        return tensor

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.take_matrix`."""
        matrix = self._stored.outline(name, shape)
        self.nbytes += nbytes_of(matrix)
        return matrix

    def outline(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.outline`."""
        return self._stored.outline(name, shape)

    def finish(self, ignored: re.Pattern[str]) -> None:
        """See `WeightSource.finish`: what is left over is found when the weights are read."""


class Survey:
    """The bundles and tables of a model, in their order. A `Writer` that notes the shapes of what it is given."""

    def __init__(self) -> None:
        self.layouts: list[BundleLayout] = []
        self.tables: list[Piece] = []

    def bundle(self, index: int, tensors: Sequence[Tensor]) -> None:
        self.layouts.append(BundleLayout.of(tensors))

    def table(self, index: int, matrix: Tensor) -> None:
        self.tables.append(Piece(tuple(matrix.shape), matrix.dtype, 0))


def survey(
    model: ResolvedModel, dtype: torch.dtype, linear: MakeLinear, attention: Attention, max_model_len: int | None
) -> Survey:
    """The parts of `model`, as they are where its weights are streamed as `dtype` to layers of `linear`.
    Raises what `build_stack` raises for a model that cannot be.
    """
    found = Survey()
    source = MetaWeights(weights_of(model, torch.device("cpu"), dtype), dtype)
    build_stack(model, source, FillText(found, dtype, linear), attention, max_model_len)
    return found
