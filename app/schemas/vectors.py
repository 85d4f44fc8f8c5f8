"""What a client may ask of steering vectors."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from app.schemas.edits import VECTOR_NAME
from app.schemas.wire import WireModel


class VectorQuery(WireModel):
    """What to call a vector."""

    model_config = ConfigDict(strict=False)

    name: str = Field(pattern=VECTOR_NAME)
