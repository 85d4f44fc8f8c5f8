"""What the journal is told: how a session is now, and what its history is from some position on."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain import Phase, Residency, SessionId

TOKEN_BYTES = 4
"""A token id is an unsigned 32-bit integer in the machine's byte order: an item of `array("I")`."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session without its history. `metadata` and `usage` are JSON; `name` is what `X-Session-ID` calls it."""

    id: SessionId
    owner: str | None
    name: str | None
    metadata: str
    ttl_s: int | None
    residency: Residency
    phase: Phase
    created_at: float
    used_at: float
    usage: str


@dataclass(frozen=True, slots=True)
class Change:
    """The session is `record` now, and its history from `position` on is `token_ids`, whatever stood there before."""

    record: SessionRecord
    position: int
    token_ids: bytes

    def then(self, later: Change) -> Change:
        """This change and a later one of the same session, as one."""
        if later.position <= self.position:
            return later
        kept = self.token_ids[: (later.position - self.position) * TOKEN_BYTES]
        return Change(later.record, self.position, kept + later.token_ids)


Batch = dict[SessionId, Change | None]
"""What is to be written, by session; None: the session is gone."""


def add_to(batch: Batch, session: SessionId, change: Change | None) -> None:
    """Put what happened to `session` after all that is in `batch`."""
    earlier = batch.get(session)
    batch[session] = change if change is None or earlier is None else earlier.then(change)
