"""The events of the live stream."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Json
from typing_extensions import TypeAliasType

from app.domain.values import FinishReason
from app.messages import Failed, TurnFinished
from app.sessions.session import Session
from app.wire.checkpoint import CheckpointView
from app.wire.memory import MemoryView
from app.wire.sessions import ResumeTimes, SessionView
from app.wire.turns import TurnUsageView

EventId = Annotated[str | None, Field(description="for `Last-Event-ID`; the last part of a snapshot has it")]


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
    """A client has edited or overwritten the checkpoint of a paused turn, which is after `layer`."""

    session_id: str
    layer: int


class LiveSnapshotEvent(BaseModel):
    """The first event, and the next one for a client that has missed some. `data` is the JSON text of a
    `SnapshotView`.
    """

    id: EventId = None
    event: Literal["snapshot"]
    data: Json[SnapshotView]


class LiveSessionEvent(BaseModel):
    """A session has opened, changed or closed. `data` is the JSON text of a `SessionNews`."""

    id: EventId = None
    event: Literal["session"]
    data: Json[SessionNews]


class LiveTurnEvent(BaseModel):
    """A turn has begun or is over. `data` is the JSON text of a `TurnNews`."""

    id: EventId = None
    event: Literal["turn"]
    data: Json[TurnNews]


class LiveTokensEvent(BaseModel):
    """Turns have generated tokens. `data` is the JSON text of a `TokensNews`."""

    id: EventId = None
    event: Literal["tokens"]
    data: Json[TokensNews]


class LivePauseEvent(BaseModel):
    """A turn has paused. `data` is the JSON text of a `PauseNews`."""

    id: EventId = None
    event: Literal["pause"]
    data: Json[PauseNews]


class LiveBreakpointsEvent(BaseModel):
    """A session has other breakpoints. `data` is the JSON text of a `BreakpointsNews`."""

    id: EventId = None
    event: Literal["breakpoints"]
    data: Json[BreakpointsNews]


class LiveEditEvent(BaseModel):
    """A checkpoint is another. `data` is the JSON text of an `EditNews`."""

    id: EventId = None
    event: Literal["edit"]
    data: Json[EditNews]


class LiveMemoryEvent(BaseModel):
    """The memory map, once a second. `data` is the JSON text of a `MemoryView`."""

    id: EventId = None
    event: Literal["memory"]
    data: Json[MemoryView]


LiveEvent = TypeAliasType(
    "LiveEvent",
    Annotated[
        LiveSnapshotEvent
        | LiveSessionEvent
        | LiveTurnEvent
        | LiveTokensEvent
        | LivePauseEvent
        | LiveBreakpointsEvent
        | LiveEditEvent
        | LiveMemoryEvent,
        Discriminator("event"),
    ],
)
"""One server-sent event of the live stream."""
