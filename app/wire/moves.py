"""Bodies about sessions that move between servers."""

from pydantic import BaseModel, Field

from app.wire.base import WireModel


class MoveBody(WireModel):
    """Where the session is to go."""

    replica: str = Field(min_length=1, max_length=16, description="name of a server of the cluster")


class MoveView(BaseModel):
    """Where the session is now, and what came with it."""

    id: str
    replica: str
    url: str = Field(description="where that server is asked")
    tokens: int = Field(description="of its history")
    tokens_with_kv: int = Field(description="of these, from the first one, need not be recomputed")
    bytes: int = Field(description="of its history and KV, as sent")
    seconds: float = Field(description="from the first step of the move to the last")
