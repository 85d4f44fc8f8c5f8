"""What binds calls to a session, and moves with it: its name, responses, idempotency keys and tools' durations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.cluster.moves.talk import MAX_RESPONSE_BYTES, Offer
from app.domain.errors import TooLarge
from app.journal.records import KeyedRecord, ResponseRecord
from app.openai.response_store import Journaled, ResponseStore, in_order, record_of
from app.sessions.keyed import KeyedRequests
from app.sessions.named import BoundSessions
from app.sessions.session import Session
from app.sessions.tool_waits import ToolWaits, Waits

Responses = list[tuple[ResponseRecord, Journaled]]
"""A session's responses, each after those before it in its conversation."""


def read(session: Session, offer: Offer) -> Responses:
    """Read and check what has been sent for a session that is not here yet. Raises `ValueError` for malformed
    responses, and for responses and keys of other sessions.
    """
    sessions = {*(each.session for each in offer.keyed), *(each.session for each in offer.responses)}
    if sessions - {session.id} or any(each.owner != session.owner for each in offer.keyed):
        raise ValueError("a key or a response is of another session")
    session.prompt_tokens = max(0, min(offer.prompt_tokens, len(session.history)))
    return in_order(offer.responses)


class Bindings:
    """Used on the event loop only."""

    def __init__(self, bound: BoundSessions, responses: ResponseStore, waits: ToolWaits, keyed: KeyedRequests) -> None:
        self._bound = bound
        self._responses = responses
        self._waits = waits
        self._keyed = keyed
        self.on_adopted: Callable[[Session], object] = lambda session: None
        """Called with each session that has arrived."""

    async def export(self, session: Session) -> tuple[list[ResponseRecord], Waits | None, list[KeyedRecord]]:
        """What to send with a session that nobody uses. Raises `TooLarge`."""
        kept = self._responses.of_session(session)
        if sum(each.size for each in kept) > MAX_RESPONSE_BYTES:
            raise TooLarge(f"the session's responses have more than the {MAX_RESPONSE_BYTES} bytes that can move")
        records = await asyncio.to_thread(lambda: [record_of(each) for each in kept])
        return records, self._waits.export(session), self._keyed.of_session(session.id)

    def let_go(self, session: Session) -> list[str]:
        """Drop all of a session that another server has now. Returns the ids of its responses."""
        gone = [each.answer.id for each in self._responses.of_session(session)]
        self._responses.let_go(session)
        return gone

    @contextmanager
    def expecting(self, session: Session, responses: Responses) -> Iterator[None]:
        """Keep the name, and room for the responses, of a session that is on its way here.

        Raises `NameTaken`, `PeerFull`, `WrongState`.
        """
        with self._bound.expecting(session), self._responses.expecting([record for record, _ in responses]):
            yield

    def adopt(self, session: Session, offer: Offer, responses: Responses) -> None:
        """Bind calls to a session that is here from now on."""
        self._bound.adopt(session)
        self._responses.adopt(session, responses)
        self._keyed.adopt(offer.keyed)
        if offer.waits is not None:
            self._waits.adopt(session, offer.waits)
        self.on_adopted(session)
