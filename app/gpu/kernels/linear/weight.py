"""The cell in which a model finds a tensor that it computes with."""

from typing import Protocol

from torch import Tensor


class FilePlace(Protocol):
    """Where a tensor's bytes are, in an open file, before they have been brought to the tensor's memory."""

    @property
    def file(self) -> int:
        """The descriptor."""
        ...

    @property
    def offset(self) -> int:
        """Bytes from the file's start."""
        ...

    def is_intact(self) -> bool:
        """Whether whatever has been read there until now is what was stored."""
        ...

    def bring(self) -> Tensor:
        """The tensor in its memory, to which its bytes are copied. Raises `WeightsLost`."""
        ...


class Weight:
    """A tensor that a model computes with. One that is streamed has a `tensor` only while its bundle is in use; while
    it has a `place` too, its bytes are there, and come to memory when the tensor is first read.
    """

    __slots__ = ("_tensor", "place")

    _tensor: Tensor
    place: FilePlace | None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def tensor(self) -> Tensor:
        """Raises AttributeError if it is nowhere, `WeightsLost` if it cannot be brought."""
        if self.place is not None:
            self.tensor = self.place.bring()
        return self._tensor

    @tensor.setter
    def tensor(self, tensor: Tensor) -> None:
        self._tensor, self.place = tensor, None

    @tensor.deleter
    def tensor(self) -> None:
        if self.place is None:
            del self._tensor
        self.place = None
