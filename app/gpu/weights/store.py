"""The host's copy of the weights that are streamed: where bundles come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from app.gpu.streams import Event


class BundleStore(Protocol):
    """Every bundle and table of a model, complete before the first is loaded."""

    def load(self, index: int, target: Tensor, after: Sequence[Event]) -> Event:
        """Launch the copy of bundle `index` to `target` `[nbytes]` uint8 on the device, in the order of the calls; it
        begins once every event of `after` has passed, at the latest when its event is waited for, which only the thread
        that launched it may do. Returns at once.

        The event's `synchronize` raises `WeightsLost` if the bundle cannot be read or is not what was stored.
        """
        ...

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """Rows `ids` `[n]` int64 (host memory) of a table, `[n, width]`, in host memory that copies fast to the device.

        Raises `WeightsLost`.
        """
        ...

    def close(self) -> None:
        """Stop copying and let go of the host's memory. Nothing is loaded any more."""
        ...
