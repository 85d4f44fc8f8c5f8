"""Where streamed weights come from: the host copy of every bundle, and the chunks that it travels in."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from app.gpu.device.streams import Event


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


def chunks(nbytes: int, chunk_bytes: int) -> list[slice]:
    """The bytes of a bundle in runs of at most `chunk_bytes`, each of which is one copy.

    A GPU has one copy engine for each direction. It ends the copy that it has begun, then takes the next one of
    whichever stream has one ready. So a KV move or a step's inputs, on streams of their own, wait for at most one chunk
    of weights, not for all bundles that have been ordered. Long chunks cost the others time; short ones cost bandwidth.
    """
    return [slice(start, min(start + chunk_bytes, nbytes)) for start in range(0, nbytes, chunk_bytes)]
