"""The events of the live stream."""

from typing import Literal, Self

from pydantic import BaseModel, Field

from app.domain.points import Point
from app.domain.values import FinishReason
from app.messages import Failed, TurnFinished
from app.sessions.session import Session
from app.wire.base import any_event
from app.wire.checkpoint import CheckpointView
from app.wire.history import FindingsView
from app.wire.memory import MemoryView
from app.wire.sessions import ResumeTimes, SessionView
from app.wire.turns import TurnUsageView


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
    `resume_ms` of one that is over is what it waited for.
    """

    session_id: str
    status: Literal["begun", "finished", "failed"]
    finish_reason: FinishReason | None = None
    usage: TurnUsageView | None = None
    resume_ms: ResumeTimes | None = None
    code: str | None = None

    @classmethod
    def of_end(cls, session: Session, end: TurnFinished | Failed, time: float) -> Self:
        """How the turn has ended."""
        waits = ResumeTimes.of(session.usage)
        if isinstance(end, Failed):
            return cls(time=time, session_id=session.id, status="failed", resume_ms=waits, code=end.error.code)
        return cls(
            time=time,
            session_id=session.id,
            status="finished",
            finish_reason=end.reason,
            usage=TurnUsageView.model_validate(end.usage),
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
