"""Dense layers `y = x W^T + b`, whichever type and layout the weight has and wherever it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from torch import Tensor


class MatmulPrecision(Enum):
    """In which type inputs meet weights. All is summed in float32."""

    FLOAT32 = auto()
    AS_KEPT = auto()
    """bfloat16 for matrices that are kept in it, else float32."""
    BFLOAT16 = auto()


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where a tensor's bytes are, in an open file, before they have been brought to the tensor's memory."""

    file: int
    """The descriptor."""
    offset: int
    """Bytes from the file's start."""
    is_intact: Callable[[], bool]
    """Whether whatever has been read there until now is what was stored."""
    bring: Callable[[], Tensor]
    """Copies the bytes to the tensor's memory, and gives the tensor. Raises `WeightsLost`."""


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


class Linear(Protocol):
    """A dense layer."""

    in_features: int
    out_features: int

    @property
    def weights(self) -> Sequence[Weight]:
        """The tensors that the layer computes with, dense, each in the layout in which it multiplies them: whoever
        stores or moves a layer's weights, does so with these.
        """

    def __call__(self, x: Tensor) -> Tensor:
        """`[tokens, in_features]` to `[tokens, out_features]`, both in the dtype that the model computes in."""


def cells(weight: Tensor, bias: Tensor | None) -> list[Weight]:
    """The weight, and the bias if there is one."""
    return [Weight(weight)] if bias is None else [Weight(weight), Weight(bias)]


def bias_of(weights: Sequence[Weight]) -> Tensor | None:
    """The bias among `cells`, if there is one."""
    return weights[1].tensor if len(weights) > 1 else None
