"""Dense layers `y = x W^T + b`, whichever layout the weight has and wherever it is."""

from typing import Protocol

from torch import Tensor

from app.gpu.linear.weight import Weight


class Linear(Protocol):
    """A dense layer."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """`[tokens, in_features]` to `[tokens, out_features]`, both in the dtype of the weight."""
        ...


class MakeLinear(Protocol):
    """How a model's dense layers are made."""

    def __call__(self, weight: Weight, bias: Weight | None = None) -> Linear:
        """The layer for `weight` `[out, in]` and `bias` `[out]`, which may be on `meta`. Afterwards `weight` holds the
        tensor in the layout in which the layer multiplies it: whoever stores or moves it, does so with that.
        """
        ...


def tensor_of(bias: Weight | None) -> Tensor | None:
    """The bias, if there is one."""
    return None if bias is None else bias.tensor
