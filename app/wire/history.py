"""What sessions and the server did, what is wrong now, and the events of the live stream."""

from typing import Literal, Self

from pydantic import BaseModel, Field

from app.domain.memory_map import MemoryMap
from app.domain.points import Point
from app.domain.values import MAX_NAME, FinishReason, Phase, Tier
from app.messages import Failed, TurnFinished
from app.sessions.findings import FindingKind, Findings
from app.sessions.history import MarkKind
from app.sessions.session import RecomputeReason, Session
from app.wire.base import QueryModel, View, any_event, shape
from app.wire.checkpoint import CheckpointView
from app.wire.memory import MemoryView
from app.wire.sessions import ResumeTimes, SessionView
from app.wire.turns import TurnUsageView


class FindingView(View):
    """One sentence that an operator should know, and whom it is about: `sessions`, the worst first, or a `tenant`."""

    kind: FindingKind
    text: str
    sessions: list[str]
    tenant: str | None


class CapacityView(View):
    """How many `more` agents like those of the last two minutes have room, and in words what each takes and what the
    limit is. It is an estimate from means.
    """

    more: int
    text: str


class FindingsView(BaseModel):
    """What is wrong, the gravest first. `capacity` is for operators; null also where no agent has done anything."""

    data: list[FindingView]
    capacity: CapacityView | None

    @classmethod
    def of(cls, findings: Findings, memory: MemoryMap | None, owner: str | None, *, is_operator: bool) -> Self:
        """What that caller may know. `memory`: None while the engine does not tell."""
        sees_all = memory is not None and (is_operator or owner is None)
        capacity = findings.load.capacity(memory) if memory is not None and sees_all else None
        return cls(data=findings.tell(memory, owner, is_operator=is_operator), capacity=capacity)


class TimelineQuery(QueryModel):
    """Which entries of a session to tell."""

    limit: int = Field(100, ge=1, le=1000)
    before: int | None = Field(None, ge=1, lt=1 << 53, description="`id` of the last entry of the page before")


class TimelineEntry(BaseModel):
    """What happened to a session `at` that time, in Unix seconds. Fields that the kind does not have are null.

    A `turn` that is over has its tokens, what its first token waited for, and `seconds` from the queue to its end.
    `late_s` is how much later it began than a signal had said; below 0 it was early. A `phase` is a signal, with the
    time that it gave. KV that `moved` is in `tier` now. A session that came tells its `phase` and `tier` then. A
    turn that `paused` stands at `layer` and `point`. One that a restart ended has `finish_reason` `shutdown`, and kept
    its tokens, or `code` `server_restarted`, and lost them. One that `closed` tells its owner what it was called, as
    `name`.

    `recompute_reason` is why KV of a turn's context was gone: no tier had room and it was `dropped`, the server or its
    engine has `restarted`, or the session has `moved` without it; null where that is not known.
    """

    id: int
    at: float
    kind: Literal["opened", "restored", "arrived", "turn", "paused", "resumed", "phase", "moved", "departed", "closed"]
    tokens: int | None = None
    status: Literal["finished", "failed"] | None = None
    finish_reason: FinishReason | None = None
    code: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_recomputed: int | None = None
    recompute_reason: RecomputeReason | None = None
    queue_ms: float | None = None
    restore_ms: float | None = None
    prefill_ms: float | None = None
    seconds: float | None = None
    late_s: float | None = None
    phase: Phase | None = None
    returns_at: float | None = None
    tier: Tier | None = None
    layer: int | None = None
    point: str | None = None
    name: str | None = None


Timeline = shape(
    "Timeline",
    "Entries of a session, the newest first. If there are more, call again with `before` set to the last one's id.",
    {"data": [TimelineEntry], "has_more": bool},
)


class ActivityQuery(QueryModel):
    """Since when to tell."""

    since: float = Field(0, ge=0, le=1e11, description="Unix seconds; default: all that is kept")
    step_s: int = Field(60, ge=60, le=86_400, multiple_of=60, description="seconds that each entry sums up")
    limit: int = Field(1440, ge=1, le=10_000, description="most entries")


class ActivityMinute(BaseModel):
    """One minute, or `step_s`, which begins `at`, in Unix seconds: turns that ended in it, of how many agents in the
    same minute, and their tokens. An agent is a session that is none of an experiment, a batch or an embedding.

    `worst_ms` is the longest that an agent's turn waited for its first token, `late` counts turns that began later than
    their session had signalled, and `late_restores` those that waited for KV that was not on the device. `bytes_out` of
    KV left the device, `bytes_in` came back. Sessions held `device_bytes`, `host_bytes` and `disk_bytes` at the end of
    a minute; `turns_running` and `turns_waiting` are the most that were seen. Of several minutes, these are the most.

    What a tenant's sessions share counts for each of them. It is not told what went to the disk and came from there.
    """

    at: int
    agents: int
    turns: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_recomputed: int
    worst_ms: float
    late: int
    late_restores: int
    bytes_out: int
    bytes_in: int
    bytes_to_disk: int
    bytes_from_disk: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    turns_running: int
    turns_waiting: int


class ServerMark(BaseModel):
    """What happened to the server at that time. It was `deployed` if it started with another version or model than
    before. If it was `killed`, or crashed, that is when it was last heard of. `replica` is its name in a cluster.
    """

    at: float
    kind: MarkKind
    version: str | None = None
    model: str | None = None
    replica: str | None = None


Activity = shape(
    "Activity",
    "Minutes in which there was anything, the oldest first, and what happened to the server. If there are more, call\n"
    "again with `since` set to the end of the last one.",
    {"minutes": [ActivityMinute], "marks": [ServerMark], "has_more": bool},
)


class ClosedQuery(QueryModel):
    """Which closed sessions to list."""

    find: str = Field("", max_length=MAX_NAME, description="words, each of which is in the session's id or name")
    before: float | None = Field(None, gt=0, le=1e11, description="`closed_at` of the last one of the page before")
    limit: int = Field(20, ge=1, le=100)


class ClosedSession(BaseModel):
    """A session that closed at that time, in Unix seconds. `name` is what its client called it, if it did; only the
    tenant whose it was is told.
    """

    id: str
    tenant: str | None
    name: str
    closed_at: float


ClosedPage = shape(
    "ClosedPage",
    "Closed sessions, the last one first. If there are more, call again with `before` set to the last one's\n"
    "`closed_at`.",
    {"data": [ClosedSession], "has_more": bool},
)


class TimedNews(BaseModel):
    """What every event but figures has."""

    time: float = Field(description="when it was told first, in Unix seconds: an event that is sent again keeps it")


class SnapshotView(TimedNews):
    """Sessions that are open, oldest first. If `has_more`, the next event is a snapshot too, with those after them."""

    sessions: list[SessionView]
    has_more: bool


class SessionNews(TimedNews):
    """A session as it is after a change, or as it was when it closed."""

    change: Literal["opened", "changed", "closed"]
    session: SessionView


class TokensNews(BaseModel):
    """How many tokens sessions have whose turns run: those that have grown since the last event of this kind."""

    tokens: dict[str, int]


class TurnNews(TimedNews):
    """A turn that is in the queue from now on (`begun`), or over.

    `finish_reason` and `usage` are those of one that has finished, `code` is the error's of one that has failed.
    `recompute_reason` is why it recomputed tokens, as far as that is known; `resume_ms` of one that is over is what it
    waited for.
    """

    session_id: str
    status: Literal["begun", "finished", "failed"]
    finish_reason: FinishReason | None = None
    usage: TurnUsageView | None = None
    recompute_reason: RecomputeReason | None = None
    resume_ms: ResumeTimes | None = None
    code: str | None = None

    @classmethod
    def of_end(cls, session: Session, end: TurnFinished | Failed, time: float) -> Self:
        """How the turn has ended."""
        waits = session.usage
        if isinstance(end, Failed):
            return cls(time=time, session_id=session.id, status="failed", resume_ms=waits, code=end.error.code)
        return cls(
            time=time,
            session_id=session.id,
            status="finished",
            finish_reason=end.reason,
            usage=end.usage,
            recompute_reason=waits.recompute_reason,
            resume_ms=waits,
        )


class PauseNews(TimedNews):
    """A turn that stands at a breakpoint."""

    session_id: str
    checkpoint: CheckpointView


class BreakpointsNews(TimedNews):
    """Breakpoints of a session were set or removed, or have gone after they acted: `armed` has the ids of those that it
    has from now on, in their order.
    """

    session_id: str
    armed: list[str]


class EditNews(TimedNews):
    """A client has edited or overwritten the checkpoint of a paused turn, which is at a `point` of `layer`."""

    session_id: str
    layer: int
    point: Point


LiveEvent = any_event(
    "LiveEvent",
    (
        "snapshot",
        "LiveSnapshotEvent",
        "The first event, and the next one for a client that has missed some.",
        SnapshotView,
    ),
    ("session", "LiveSessionEvent", "A session has opened, changed or closed.", SessionNews),
    ("turn", "LiveTurnEvent", "A turn has begun or is over.", TurnNews),
    ("tokens", "LiveTokensEvent", "Turns have generated tokens.", TokensNews),
    ("pause", "LivePauseEvent", "A turn has paused.", PauseNews),
    ("breakpoints", "LiveBreakpointsEvent", "A session has other breakpoints.", BreakpointsNews),
    ("edit", "LiveEditEvent", "A checkpoint is another.", EditNews),
    ("memory", "LiveMemoryEvent", "The memory map, once a second.", MemoryView),
    ("findings", "LiveFindingsEvent", "What is wrong, once a second.", FindingsView),
    id=(str | None, Field(None, description="for `Last-Event-ID`; the last part of a snapshot has it")),
)
"""One server-sent event of the live stream."""
