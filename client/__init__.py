"""The Python client of a Djinn server: `Djinn` blocks, `AsyncDjinn` is for asyncio. docs/client.md shows both."""

from client._async.breakpoints import AsyncBreakpoint, AsyncCheckpoint
from client._async.client import AsyncDjinn, AsyncSessions
from client._async.jobs import AsyncActivationsJob, AsyncActivationsJobs
from client._async.session import AsyncSession
from client._async.turn import AsyncTurnStream
from client._async.uploads import AsyncDictionaries, AsyncLenses, AsyncProbes
from client._async.vectors import AsyncVectors
from client._sync.breakpoints import Breakpoint, Checkpoint
from client._sync.client import Djinn, Sessions
from client._sync.jobs import ActivationsJob, ActivationsJobs
from client._sync.session import Session
from client._sync.turn import TurnStream
from client._sync.uploads import Dictionaries, Lenses, Probes
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
    JobFailed,
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
from client.experiments import Activations, Patching, PatchingTable, read_activations_folder
from client.history_models import Activity, ActivityMinute, ServerMark, Timeline, TimelineEntry
from client.job_models import ActivationsJobInfo
from client.live import Event
from client.memory_models import MemoryEstimate, MemoryMap
from client.models import (
    DefaultSampling,
    FeaturesReading,
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
from client.trace import Saved, Trace, TracePoint

__all__ = [
    "APIError",
    "Activations",
    "ActivationsJob",
    "ActivationsJobInfo",
    "ActivationsJobs",
    "Activity",
    "ActivityMinute",
    "AsyncActivationsJob",
    "AsyncActivationsJobs",
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
    "FeaturesReading",
    "Forbidden",
    "Health",
    "History",
    "InvalidAnswer",
    "InvalidRequest",
    "JobFailed",
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
    "Patching",
    "PatchingTable",
    "PhaseChange",
    "PointInfo",
    "ProbeInfo",
    "ProbeReading",
    "Probes",
    "RateLimited",
    "Saved",
    "ServerError",
    "ServerMark",
    "Session",
    "SessionInfo",
    "Sessions",
    "StreamBroken",
    "Timeline",
    "TimelineEntry",
    "Timeout",
    "TokenEvent",
    "TooLarge",
    "Trace",
    "TracePoint",
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
    "read_activations_folder",
]
