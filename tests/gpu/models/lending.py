"""Weights that a model has only while it uses them: what streaming does, without the streaming."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from app.gpu.attention.reference import ReferenceAttention
from app.gpu.linear import linear_maker
from app.gpu.linear.base import Linear, MakeLinear
from app.gpu.linear.matrix import Matrix, numbers_of
from app.gpu.linear.weight import Weight
from app.gpu.models import build_stack
from app.gpu.models.base import LayerStack
from app.gpu.weight_files.layout import BundleLayout
from app.gpu.weight_ring.fill import FillText
from app.gpu.weight_ring.survey import MetaWeights
from app.gpu.weights.source import weights_of
from app.model_store.resolve import ResolvedModel

CPU = torch.device("cpu")


def streamed_linear(dtype: torch.dtype, *, batch_invariant: bool = False) -> MakeLinear:
    """The layers of weights that come and go."""
    return linear_maker(CPU, dtype, streamed=True, batch_invariant=batch_invariant)


class Shelf:
    """A `Writer` that keeps the bytes of what it is given."""

    def __init__(self) -> None:
        self.layouts: list[BundleLayout] = []
        self.bundles: list[Tensor] = []
        self.tables: list[Tensor] = []

    def bundle(self, index: int, tensors: Sequence[Tensor]) -> None:
        assert index == len(self.bundles)
        layout = BundleLayout.of(tensors)
        memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for view, tensor in zip(layout.views(memory), tensors, strict=True):
            view.copy_(tensor)
        self.layouts.append(layout)
        self.bundles.append(memory)

    def table(self, index: int, matrix: Tensor) -> None:
        assert index == len(self.tables)
        self.tables.append(matrix.clone())


class LendingText:
    """A `Text` for a model that is built on `meta`. Who uses a weight before or after its bundle's turn fails; who goes
    on with what it was lent finds garbage.
    """

    def __init__(self, shelf: Shelf, dtype: torch.dtype, *, batch_invariant: bool) -> None:
        self.device, self.dtype = CPU, dtype
        self.used: list[int] = []
        self._shelf = shelf
        self._linear = streamed_linear(dtype, batch_invariant=batch_invariant)
        self._weights: list[list[Weight]] = []
        self._tables = iter(shelf.tables)
        self._lent = False

    @contextmanager
    def bundle(self) -> Iterator[_Bundle]:
        bundle = _Bundle(self._linear)
        yield bundle
        self._weights.append(bundle.weights)
        for weight in bundle.weights:
            del weight.tensor

    def table(self, matrix: Matrix) -> _Table:
        return _Table(matrix, next(self._tables), self.dtype)

    @contextmanager
    def using(self, index: int) -> Iterator[None]:
        assert not self._lent, "two bundles at a time"
        self._lent = True
        self.used.append(index)
        memory = self._shelf.bundles[index].clone()
        for weight, view in zip(self._weights[index], self._shelf.layouts[index].views(memory), strict=True):
            weight.tensor = view
        yield
        for weight in self._weights[index]:
            del weight.tensor
        memory.fill_(0xFF)  # as numbers: not a number
        self._lent = False


class _Bundle:
    def __init__(self, make: MakeLinear) -> None:
        self.weights: list[Weight] = []
        self._make = make

    def hold(self, tensor: Tensor) -> Weight:
        assert tensor.is_meta
        self.weights.append(Weight(tensor))
        return self.weights[-1]

    def linear(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        linear = self._make(weight, bias)
        assert all(weight.tensor.is_meta for weight in linear.weights)
        self.weights += linear.weights
        return linear


class _Table:
    def __init__(self, matrix: Matrix, stored: Tensor, dtype: torch.dtype) -> None:
        self._matrix, self._stored, self._dtype = matrix, stored, dtype

    def rows(self, ids: Tensor) -> Tensor:
        return numbers_of(self._matrix, self._stored[ids]).to(self._dtype)


def fill(model: ResolvedModel, dtype: torch.dtype, *, batch_invariant: bool = False) -> Shelf:
    """All weights of `model`."""
    shelf = Shelf()
    text = FillText(shelf, dtype, streamed_linear(dtype, batch_invariant=batch_invariant))
    build_stack(model, weights_of(model, CPU, dtype), text, ReferenceAttention(), None)
    return shelf


def lend(model: ResolvedModel, dtype: torch.dtype, *, batch_invariant: bool = False) -> tuple[LayerStack, LendingText]:
    """`model`, and the text that lends it its weights."""
    text = LendingText(fill(model, dtype, batch_invariant=batch_invariant), dtype, batch_invariant=batch_invariant)
    source = MetaWeights(weights_of(model, CPU, dtype), dtype)
    return build_stack(model, source, text, ReferenceAttention(), None), text
