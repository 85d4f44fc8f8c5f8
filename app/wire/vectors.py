"""Bodies about steering vectors."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from app.domain.breakpoints import TensorData
from app.wire.base import WireModel
from app.wire.edits import VECTOR_NAME
from app.wire.tensors import norm


class VectorQuery(WireModel):
    """What to call a vector."""

    model_config = ConfigDict(strict=False)

    name: str = Field(pattern=VECTOR_NAME)


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
