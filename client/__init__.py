"""The Python client of a Djinn server: `Djinn` blocks, `AsyncDjinn` is for asyncio. docs/client.md shows both."""

from client.async_client import AsyncDjinn, AsyncSessions
from client.async_session import AsyncSession, AsyncTurnStream
from client.errors import (
    APIError,
    BadRequest,
    Conflict,
    ConnectionFailed,
    ConnectionLost,
    DjinnError,
    InvalidAnswer,
    InvalidRequest,
    NotFound,
    RateLimited,
    ServerError,
    StreamBroken,
    Timeout,
    TooLarge,
    TransportError,
    Unauthorized,
    Unprocessable,
)
from client.memory_models import MemoryMap
from client.models import Health, History, Model, PhaseChange, SessionInfo, TokenEvent, Turn, Usage
from client.sync_client import Djinn, Sessions
from client.sync_session import Session, TurnStream

__all__ = [
    "APIError",
    "AsyncDjinn",
    "AsyncSession",
    "AsyncSessions",
    "AsyncTurnStream",
    "BadRequest",
    "Conflict",
    "ConnectionFailed",
    "ConnectionLost",
    "Djinn",
    "DjinnError",
    "Health",
    "History",
    "InvalidAnswer",
    "InvalidRequest",
    "MemoryMap",
    "Model",
    "NotFound",
    "PhaseChange",
    "RateLimited",
    "ServerError",
    "Session",
    "SessionInfo",
    "Sessions",
    "StreamBroken",
    "Timeout",
    "TokenEvent",
    "TooLarge",
    "TransportError",
    "Turn",
    "TurnStream",
    "Unauthorized",
    "Unprocessable",
    "Usage",
]
