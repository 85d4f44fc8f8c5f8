"""What the server answers about steering vectors."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel

from app.breakpoints import TensorData
from app.tensors import norm


class VectorView(BaseModel):
    """A named vector of `size` numbers; `norm` is its L2 length."""

    name: str
    size: int
    dtype: str
    norm: float

    @classmethod
    def of(cls, name: str, vector: TensorData) -> Self:
        """What there is to know of it without its numbers."""
        return cls(name=name, size=vector.shape[0], dtype=vector.dtype, norm=norm(vector))


class VectorList(BaseModel):
    """The caller's vectors by name."""

    data: list[VectorView]
