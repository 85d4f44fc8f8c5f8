"""What binds calls to a session, and moves with it: its name, responses, idempotency keys and tools' durations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from app.domain.errors import TooLarge
from app.journal.records import KeyedRecord, ResponseRecord
from app.openai.response_store import ResponseStore, in_order, record_of
from app.sessions.keyed import KeyedRequests
from app.sessions.named import BoundSessions
from app.sessions.session import Session
from app.sessions.tool_waits import ToolWaits, Waits

MAX_RESPONSE_BYTES = 128 << 20
"""Of a session's responses, as JSON."""


class Binding(msgspec.Struct, frozen=True):
    """What is sent of that. The name is in the session's record.

    `responses` have the id and the JSON of each, as the journal has it. The session's last turn began at
    `prompt_tokens`, and the model's answers begin at `answers` in its history. `keyed` is what requests with an
    `Idempotency-Key` have done in it.
    """

    responses: list[tuple[str, bytes]]
    waits: Waits | None
    prompt_tokens: int
    keyed: list[KeyedRecord] = []
    answers: list[int] = []


class Brought:
    """What has been sent, read and checked."""

    def __init__(self, session: Session, binding: Binding) -> None:
        """For a session that is not here yet. Raises `ValueError` for malformed responses, and for keys of other
        sessions.
        """
        if any((each.session, each.owner) != (session.id, session.owner) for each in binding.keyed):
            raise ValueError("a key is of another session")
        self.session = session
        self.binding = binding
        self.responses = in_order([ResponseRecord(each, session.id, body) for each, body in binding.responses])
        self.records = [record for record, _ in self.responses]
        session.prompt_tokens = max(0, min(binding.prompt_tokens, len(session.history)))
        session.usage.answers = [start for start in binding.answers if 0 < start < len(session.history)]


class Bindings:
    """Used on the event loop only."""

    def __init__(self, bound: BoundSessions, responses: ResponseStore, waits: ToolWaits, keyed: KeyedRequests) -> None:
        self._bound = bound
        self._responses = responses
        self._waits = waits
        self._keyed = keyed
        self.on_adopted: Callable[[Session], object] = lambda session: None
        """Called with each session that has arrived."""

    async def export(self, session: Session) -> Binding:
        """What to send with a session that nobody uses. Raises `TooLarge`."""
        kept = self._responses.of_session(session)
        if sum(each.size for each in kept) > MAX_RESPONSE_BYTES:
            raise TooLarge(f"the session's responses have more than the {MAX_RESPONSE_BYTES} bytes that can move")
        records = await asyncio.to_thread(lambda: [record_of(each) for each in kept])
        sent = [(each.id, each.body) for each in records]
        keyed, answers = self._keyed.of_session(session.id), session.usage.answers
        return Binding(sent, self._waits.export(session), session.prompt_tokens, keyed, answers)

    def let_go(self, session: Session) -> list[str]:
        """Drop all of a session that another server has now. Returns the ids of its responses."""
        gone = [each.answer.id for each in self._responses.of_session(session)]
        self._responses.let_go(session)
        return gone

    @contextmanager
    def expecting(self, brought: Brought) -> Iterator[None]:
        """Keep the name, and room for the responses, of a session that is on its way here.

        Raises `NameTaken`, `PeerFull`, `WrongState`.
        """
        size, ids = sum(len(each.body) for each in brought.records), [each.id for each in brought.records]
        with self._bound.expecting(brought.session), self._responses.expecting(ids, size):
            yield

    def adopt(self, brought: Brought) -> None:
        """Bind calls to a session that is here from now on."""
        self._bound.adopt(brought.session)
        self._responses.adopt(brought.session, brought.responses)
        self._keyed.adopt(brought.binding.keyed)
        if brought.binding.waits is not None:
            self._waits.adopt(brought.session, brought.binding.waits)
        self.on_adopted(brought.session)
