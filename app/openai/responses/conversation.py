"""Conversations: the items of responses that go on from each other, and the session that computes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.domain.values import SessionState
from app.openai.responses.items import AnyItem, without_logprobs
from app.openai.responses.response import ResponseObject
from app.sessions.session import Session
from app.sessions.table import has_expired

IDLE_S = 24 * 3600
"""Seconds without a response after which a conversation is forgotten, whatever its session's own limit."""
CONTINUABLE = ("completed", "incomplete")


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response. Its input begins at item `start` of its conversation."""

    conversation: Conversation
    start: int
    input: Sequence[AnyItem]
    answer: ResponseObject
    is_deleted: bool = False
    """Whether only its items are kept, for the responses after it."""
    size: int = 0
    """Bytes of JSON that are kept of it."""

    @property
    def can_continue(self) -> bool:
        """Whether a conversation may go on after it."""
        return self.answer.status in CONTINUABLE

    @property
    def context(self) -> list[AnyItem]:
        """All items up to its end."""
        return [*self.conversation.items[: self.start], *self.input, *map(without_logprobs, self.answer.output)]


@dataclass(slots=True, eq=False)
class Conversation:
    """Responses in one session, each the continuation of the one before."""

    id: str
    session: Session
    is_kept: bool
    """Whether its responses are stored; otherwise they live as long as a connection, or a call."""
    owns_session: bool = True
    """Whether the session was opened for it, and closes with it."""
    items: list[AnyItem] = field(default_factory=list)
    responses: dict[str, StoredResponse] = field(default_factory=dict)
    latest: StoredResponse | None = None
    """The end of the conversation."""
    is_running: bool = False
    used_at: float = field(default_factory=time.time)

    def add(self, response: StoredResponse) -> None:
        """Take in a response that is over. It is the end of the conversation if it can be continued."""
        self.responses[response.answer.id] = response
        self.used_at = time.time()
        if response.can_continue:
            self.items += [*response.input, *map(without_logprobs, response.answer.output)]
            self.latest = response

    @property
    def is_dead(self) -> bool:
        """Whether its session has closed, or it was unused for long."""
        session = self.session
        return session.state is SessionState.CLOSED or has_expired(session) or self.used_at + IDLE_S < time.time()

    def goes_on_after(self, response: StoredResponse) -> bool:
        """Whether the next response after `response` may be computed in the session as it is now."""
        return response is self.latest and not self.is_running and self.session.state is SessionState.IDLE
