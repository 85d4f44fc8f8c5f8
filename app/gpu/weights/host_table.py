"""Rows of a matrix that stays on the host."""

import torch
from torch import Tensor

from app.gpu.kernels.linear.matrix import Matrix, numbers_of
from app.gpu.weights.store import BundleStore


class HostTable:
    """See `Table`."""

    def __init__(
        self, store: BundleStore, number: int, matrix: Matrix, device: torch.device, dtype: torch.dtype
    ) -> None:
        """The rows of `matrix`, which may be on `meta`, come from table `number` of `store` to `device` as `dtype`."""
        self._store, self._number, self._matrix = store, number, matrix
        self._device, self._dtype = device, dtype

    def rows(self, ids: Tensor) -> Tensor:
        """See `Table.rows`. The host must know the ids; a pass has just been given them, so they are soon there."""
        rows = numbers_of(self._matrix, self._store.rows(self._number, ids.cpu()))
        return rows.to(self._device, non_blocking=True).to(self._dtype)
