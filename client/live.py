"""What the live stream tells. Nothing here does I/O."""

import json
from typing import Any, Literal, Self, get_args

from httpx_sse import ServerSentEvent

from client.answer import Answer
from client.breakpoint_models import CheckpointInfo
from client.errors import InvalidAnswer
from client.history_models import Findings
from client.memory_models import MemoryMap
from client.models import FinishReason, ResumeTimes, SessionInfo, Usage

EventKind = Literal["snapshot", "session", "turn", "tokens", "pause", "breakpoints", "edit", "memory", "findings"]


class Event(Answer):
    """Something that has happened, at the Unix `time`. What does not go with its `kind` is None.

    - `snapshot`: all `sessions`, in several events if there are many (`has_more`); what was known before is obsolete
    - `session`: `session` has been opened, changed or closed, as `change` says
    - `turn`: the turn has the `status` begun, finished (`finish_reason`, `usage`) or failed (`code`); `resume_ms` is
      what it waited for, `recompute_reason` why it had to compute tokens again
    - `tokens`: how many tokens the sessions with running turns have, by id
    - `pause`: the turn stands at `checkpoint`
    - `breakpoints`: the session has the breakpoints `armed`
    - `edit`: the checkpoint at `point` of `layer` has been changed
    - `memory`: the memory map, once a second
    - `findings`: what is wrong, once a second
    """

    kind: EventKind
    id: str | None = None
    time: float | None = None
    session_id: str | None = None
    session: SessionInfo | None = None
    change: Literal["opened", "changed", "closed"] | None = None
    status: Literal["begun", "finished", "failed"] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    recompute_reason: str | None = None
    resume_ms: ResumeTimes | None = None
    code: str | None = None
    tokens: dict[str, int] | None = None
    checkpoint: CheckpointInfo | None = None
    armed: tuple[str, ...] | None = None
    layer: int | None = None
    point: str | None = None
    memory: MemoryMap | None = None
    findings: Findings | None = None
    sessions: tuple[SessionInfo, ...] | None = None
    has_more: bool | None = None

    def about(self, session: str) -> Self | None:
        """The part of the event that is about one session; None if there is none."""
        if self.sessions is not None:
            sessions = tuple(info for info in self.sessions if info.id == session)
            return self.model_copy(update={"sessions": sessions}) if sessions else None
        if self.tokens is not None:
            tokens = self.tokens.get(session)
            return None if tokens is None else self.model_copy(update={"tokens": {session: tokens}})
        return self if self.session_id == session else None


def read_event(sent: ServerSentEvent) -> Event | None:
    """One event, None if its kind is not known. Raises `InvalidAnswer` if it is not what Djinn sends."""
    if sent.event not in get_args(EventKind):
        return None
    try:
        data: dict[str, Any] = json.loads(sent.data)
        fields = {sent.event: data} if sent.event in ("memory", "findings") else data
        about = {"session_id": data["session"]["id"]} if sent.event == "session" else {}
        return Event.model_validate({**fields, **about, "kind": sent.event, "id": sent.id or None})
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidAnswer(f"the data of a {sent.event} event is not what Djinn sends: {error}") from error
