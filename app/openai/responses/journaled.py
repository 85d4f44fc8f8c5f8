"""Responses as the journal has them, and as they go to another server."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

from app.journal.records import ResponseRecord
from app.openai.responses.conversation import Conversation, StoredResponse
from app.openai.responses.encoded import to_json
from app.openai.responses.items import Item
from app.openai.responses.response import ResponseObject
from app.sessions.session import Session


class Journaled(BaseModel):
    """What is kept of a response beside its ids. The first of a conversation has the items before it."""

    conversation: str
    owns_session: bool
    start: int
    before: list[Item] = []
    input: list[Item]
    answer: ResponseObject
    is_deleted: bool = False

    @classmethod
    def of(cls, response: StoredResponse) -> Journaled:
        """That of a response of a conversation."""
        conversation = response.conversation
        is_first = response is next(iter(conversation.responses.values()))
        return cls(
            conversation=conversation.id,
            owns_session=conversation.owns_session,
            start=response.start,
            before=conversation.items[: response.start] if is_first else [],
            input=list(response.input),
            answer=response.answer,
            is_deleted=response.is_deleted,
        )

    def to_conversation(self, session: Session) -> Conversation:
        """The conversation whose first response this is."""
        return Conversation(self.conversation, session, True, self.owns_session, list(self.before))

    def to_response(self, conversation: Conversation) -> StoredResponse:
        """The response again."""
        return StoredResponse(conversation, self.start, self.input, self.answer, self.is_deleted)


def record_of(response: StoredResponse) -> ResponseRecord:
    """A response as it is written."""
    session = response.conversation.session
    return ResponseRecord(response.answer.id, session.id, to_json(Journaled.of(response)))


def in_order(records: Iterable[ResponseRecord]) -> list[tuple[ResponseRecord, Journaled]]:
    """What is written, each after those before it in its conversation. Raises `ValueError` for what is no response."""
    found = [(record, Journaled.model_validate_json(record.body)) for record in records]
    return sorted(found, key=lambda each: (each[1].answer.created_at, each[1].start))
