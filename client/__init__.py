"""The Python client of a Djinn server: `Djinn` blocks, `AsyncDjinn` is for asyncio. docs/client.md shows both."""

from client.async_breakpoints import AsyncBreakpoint, AsyncCheckpoint
from client.async_client import AsyncDjinn, AsyncSessions
from client.async_session import AsyncSession
from client.async_turn import AsyncTurnStream
from client.async_vectors import AsyncVectors
from client.breakpoint_models import BreakpointInfo, CheckpointInfo, Lens, VectorInfo
from client.captures import Capture, Captures
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
from client.sync_breakpoints import Breakpoint, Checkpoint
from client.sync_client import Djinn, Sessions
from client.sync_session import Session
from client.sync_turn import TurnStream
from client.sync_vectors import Vectors

__all__ = [
    "APIError",
    "AsyncBreakpoint",
    "AsyncCheckpoint",
    "AsyncDjinn",
    "AsyncSession",
    "AsyncSessions",
    "AsyncTurnStream",
    "AsyncVectors",
    "BadRequest",
    "Breakpoint",
    "BreakpointInfo",
    "Capture",
    "Captures",
    "Checkpoint",
    "CheckpointInfo",
    "Conflict",
    "ConnectionFailed",
    "ConnectionLost",
    "Djinn",
    "DjinnError",
    "Health",
    "History",
    "InvalidAnswer",
    "InvalidRequest",
    "Lens",
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
    "VectorInfo",
    "Vectors",
]
