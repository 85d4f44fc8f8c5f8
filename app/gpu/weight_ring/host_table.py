"""Rows of a matrix that stays on the host."""

import torch
from torch import Tensor

from app.gpu.weight_ring.store import BundleStore


class HostTable:
    """See `Table`."""

    def __init__(self, store: BundleStore, number: int, device: torch.device) -> None:
        self._store, self._number, self._device = store, number, device

    def rows(self, ids: Tensor) -> Tensor:
        """See `Table.rows`. The host must know the ids; a pass has just been given them, so they are soon there."""
        return self._store.rows(self._number, ids.cpu()).to(self._device, non_blocking=True)
