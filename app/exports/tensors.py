"""The tensors of a label, each of which it has once: many edits share a vector."""

import hashlib
from collections.abc import Iterable


class TensorTable:
    """Tensors by their digest, which stands for their data elsewhere in the label."""

    def __init__(self, tensors: Iterable[bytes] = ()) -> None:
        self._data: dict[bytes, bytes] = {_digest(data): data for data in tensors}
        self._digests: dict[int, tuple[bytes, bytes]] = {}
        """By the identity of the bytes, which are kept so that no others get it."""

    @property
    def tensors(self) -> tuple[bytes, ...]:
        """All of them."""
        return tuple(self._data.values())

    def put(self, data: bytes) -> bytes:
        """Note `data`; returns what stands for it."""
        known = self._digests.get(id(data))
        if known is None:
            known = self._digests[id(data)] = _digest(data), data
            self._data.setdefault(*known)
        return known[0]

    def get(self, stands: bytes) -> bytes:
        """The data that `stands` is for. What is no digest of a tensor here is data itself."""
        return self._data.get(stands, stands)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
