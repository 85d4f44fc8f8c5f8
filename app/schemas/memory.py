"""What a client may ask about memory."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from app.schemas.wire import WireModel


class EstimateQuery(WireModel):
    """The size of the session to estimate, and how fast it is to be moved."""

    model_config = ConfigDict(strict=False)

    tokens: int = Field(ge=1, le=10**9)
    bandwidth: float | None = Field(
        None, ge=1, le=1e15, description="bytes per second (default: what has been measured each way)"
    )
