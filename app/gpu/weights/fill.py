"""Taking a model's weights apart: each bundle and table goes to a store in the form in which it is streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from app.gpu.kernels.linear.base import Linear, MakeLinear
from app.gpu.kernels.linear.matrix import Matrix, stored_rows
from app.gpu.kernels.linear.weight import Weight


class StreamedBundle:
    """See `Bundle`."""

    def __init__(self, linear: MakeLinear) -> None:
        """`linear` makes layers whose weights come and go."""
        self.weights: list[Weight] = []
        """In the order in which they were given; what becomes of them once the bundle is complete is the text's
        business.
        """
        self._make = linear

    def hold(self, tensor: Tensor) -> Weight:
        weight = Weight(tensor)
        self.weights.append(weight)
        return weight

    def linear(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        linear = self._make(weight, bias)
        self.weights += linear.weights
        return linear


GIVEN_AWAY = "this model's weights have been given away"


class Writer(Protocol):
    """Stores what a model is made of. The tensors are dense, on whatever device they were made."""

    def bundle(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Store the tensors of bundle `index`, in this order. The first bundle comes first, and none comes twice."""
        ...

    def table(self, index: int, matrix: Tensor) -> None:
        """Store table `index`, rows as the checkpoint has them. The first table comes first, and none comes twice."""
        ...


class FillText:
    """See `Text`. Once a bundle is complete its tensors are the writer's, and none is kept. The model that has been
    built with it computes nothing; it stands on `meta`.
    """

    def __init__(self, writer: Writer, dtype: torch.dtype, linear: MakeLinear) -> None:
        """`linear` makes the layers that will compute with the weights: it decides how those are laid out."""
        self.device, self.dtype = torch.device("meta"), dtype
        self._writer = writer
        self._linear = linear
        self._bundles = self._tables = 0

    @contextmanager
    def bundle(self) -> Iterator[StreamedBundle]:
        bundle = StreamedBundle(self._linear)
        yield bundle
        self._writer.bundle(self._bundles, [weight.tensor for weight in bundle.weights])
        self._bundles += 1
        for weight in bundle.weights:
            del weight.tensor

    def table(self, matrix: Matrix) -> _NoTable:
        self._writer.table(self._tables, stored_rows(matrix))
        self._tables += 1
        return _NoTable()

    def using(self, index: int) -> AbstractContextManager[None]:
        """See `Text.using`: there is nothing to use."""
        raise AssertionError(GIVEN_AWAY)


class _NoTable:
    """See `Table`."""

    def rows(self, ids: Tensor) -> Tensor:
        """See `Table.rows`: there are none."""
        raise AssertionError(GIVEN_AWAY)
