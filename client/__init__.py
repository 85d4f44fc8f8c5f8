"""The Python client of a Djinn server: `Djinn` blocks, `AsyncDjinn` is for asyncio. docs/client.md shows both."""

from client._async.breakpoints import AsyncBreakpoint, AsyncCheckpoint
from client._async.client import AsyncDjinn, AsyncSessions
from client._async.dictionaries import AsyncDictionaries
from client._async.lenses import AsyncLenses
from client._async.probes import AsyncProbes
from client._async.session import AsyncSession
from client._async.turn import AsyncTurnStream
from client._async.vectors import AsyncVectors
from client._sync.breakpoints import Breakpoint, Checkpoint
from client._sync.client import Djinn, Sessions
from client._sync.dictionaries import Dictionaries
from client._sync.lenses import Lenses
from client._sync.probes import Probes
from client._sync.session import Session
from client._sync.turn import TurnStream
from client._sync.vectors import Vectors
from client.breakpoint_models import (
    Attribution,
    BreakpointInfo,
    CheckpointInfo,
    DictionaryInfo,
    Features,
    Lens,
    LensInfo,
    LensMap,
    LensMapLayer,
    Norms,
    PointInfo,
    ProbeInfo,
    VectorInfo,
)
from client.captures import Capture, Captures
from client.edge import raw_responses
from client.errors import (
    APIError,
    BadRequest,
    Conflict,
    ConnectionFailed,
    ConnectionLost,
    DjinnError,
    Forbidden,
    InvalidAnswer,
    InvalidRequest,
    Misdirected,
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
from client.live import Event
from client.memory_models import MemoryEstimate, MemoryMap
from client.models import (
    DefaultSampling,
    Health,
    History,
    Model,
    Move,
    PhaseChange,
    ProbeReading,
    SessionInfo,
    TokenEvent,
    Turn,
    Usage,
    Version,
)

__all__ = [
    "APIError",
    "AsyncBreakpoint",
    "AsyncCheckpoint",
    "AsyncDictionaries",
    "AsyncDjinn",
    "AsyncLenses",
    "AsyncProbes",
    "AsyncSession",
    "AsyncSessions",
    "AsyncTurnStream",
    "AsyncVectors",
    "Attribution",
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
    "DefaultSampling",
    "Dictionaries",
    "DictionaryInfo",
    "Djinn",
    "DjinnError",
    "Event",
    "Features",
    "Forbidden",
    "Health",
    "History",
    "InvalidAnswer",
    "InvalidRequest",
    "Lens",
    "LensInfo",
    "LensMap",
    "LensMapLayer",
    "Lenses",
    "MemoryEstimate",
    "MemoryMap",
    "Misdirected",
    "Model",
    "Move",
    "Norms",
    "NotFound",
    "PhaseChange",
    "PointInfo",
    "ProbeInfo",
    "ProbeReading",
    "Probes",
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
    "Version",
    "raw_responses",
]
