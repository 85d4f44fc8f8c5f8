"""Responses that are kept, in memory and in the journal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from pydantic import BaseModel

from app.domain.errors import FieldOutOfRange, Moving, NotFound, PeerFull, WrongState
from app.engine_process.turn import Turn
from app.journal.journal import Journal
from app.journal.records import ResponseKey, ResponseRecord
from app.journal.tables import load_responses
from app.openai.response import UNDER_WAY, Conversation, ResponseErrorView, ResponseObject, StoredResponse
from app.openai.response_items import AnyItem, Item, to_json, without_logprobs
from app.sessions.registry import SessionRegistry
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
    removed: list[str] = []


def record_of(response: StoredResponse) -> ResponseRecord:
    """A response as it is written."""
    conversation = response.conversation
    is_first = response is next(iter(conversation.responses.values()), response)
    kept = Journaled(
        conversation=conversation.id,
        owns_session=conversation.owns_session,
        start=response.start,
        before=conversation.items[: response.start] if is_first else [],
        input=list(response.input),
        answer=response.answer,
        is_deleted=response.is_deleted,
        removed=sorted(conversation.removed) if response is conversation.head else [],
    )
    return ResponseRecord(response.answer.id, conversation.session.id, to_json(kept))


def in_order(records: Iterable[ResponseRecord]) -> list[tuple[ResponseRecord, Journaled]]:
    """What is written, each after those before it in its conversation. Raises `ValueError` for what is no response."""
    found = [(record, Journaled.model_validate_json(record.body)) for record in records]
    return sorted(found, key=lambda it: (it[1].answer.created_at, it[1].start, it[0].id != it[1].conversation))


class ResponseStore:
    """At most `limit` responses, but for those of the conversation that was used last, and at most `max_bytes` of them
    as JSON. Used on the event loop only.

    The conversations of the owner with the most responses, or bytes, give way, those that were not used for the longest
    time first, with the sessions that were opened for them.
    A session that closes takes its responses along: from then on they are not found, and the next one that is kept
    frees their memory.
    """

    def __init__(self, registry: SessionRegistry, journal: Journal | None, *, limit: int, max_bytes: int) -> None:
        self._registry = registry
        self._journal = journal
        self._limit = limit
        self._max_bytes = max_bytes
        self._bytes = 0
        self._coming, self._coming_bytes = 0, 0
        """Responses on their way here from other servers: there is room for them."""
        self._conversations: dict[str, Conversation] = {}
        """By id; the one that was used last is the last."""
        self._responses: dict[str, StoredResponse] = {}
        self._running: dict[str, tuple[StoredResponse, Turn]] = {}
        self._items: dict[tuple[str | None, str], tuple[Conversation, AnyItem]] = {}
        """By owner and id, with the conversation of each."""

    def restore(self, sessions: Iterable[Session]) -> None:
        """Take in what the journal has of these sessions, before the journal is started."""
        if self._journal is None:
            return
        by_id = {session.id: session for session in sessions}
        for record, kept in in_order(self._journal.store.read(load_responses)):
            session, answer = by_id.get(record.session), kept.answer
            if answer.status in UNDER_WAY:
                message = "the server ended while the response was generated"
                answer.status, answer.error = "failed", ResponseErrorView(code="server_error", message=message)
            if session is None:
                self._journal.append(ResponseKey(record.id), None)
            else:
                self._take_in(session, kept, len(record.body))

    def of_session(self, session: Session) -> list[StoredResponse]:
        """Those that go with the session, each after those before it in its conversation."""
        mine = [each for each in self._conversations.values() if each.session is session]
        return [response for each in mine for response in each.responses.values()]

    @contextmanager
    def expecting(self, responses: Sequence[ResponseRecord]) -> Iterator[None]:
        """Keep room for responses that are on their way here. Nothing is forgotten for them.

        Raises `PeerFull` if there is none, `WrongState` if one of them is here.
        """
        ids, size = [each.id for each in responses], sum(len(each.body) for each in responses)
        self._forget_dead()
        if any(each in self._responses for each in ids):
            raise WrongState("some of its responses are here already")
        count, most, most_bytes = len(self._responses) + self._coming, self._limit, self._max_bytes
        if ids and count + len(ids) > most:
            raise PeerFull(f"of {most} responses {most - count} are free, and the session has {len(ids)}")
        if ids and (free := most_bytes - self._bytes - self._coming_bytes) < size:
            raise PeerFull(f"of {most_bytes} bytes of responses {free} are free, and the session has {size}")
        self._coming, self._coming_bytes = self._coming + len(ids), self._coming_bytes + size
        try:
            yield
        finally:
            self._coming, self._coming_bytes = self._coming - len(ids), self._coming_bytes - size

    def adopt(self, session: Session, responses: Iterable[tuple[ResponseRecord, Journaled]]) -> None:
        """Have the responses that a session has brought, which the journal has already."""
        for record, kept in responses:
            self._take_in(session, kept, len(record.body))

    def let_go(self, session: Session) -> list[str]:
        """Have no responses of a session that another server has, and so has them. Returns their ids."""
        gone = [each for each in self._conversations.values() if each.session is session]
        return [response.answer.id for each in gone for response in self._remove(each)]

    def _take_in(self, session: Session, kept: Journaled, size: int) -> None:
        conversation = self._conversations.get(kept.conversation)
        if conversation is None:
            conversation = Conversation(kept.conversation, session, True, kept.owns_session, list(kept.before))
            self._conversations[kept.conversation] = conversation
        conversation.removed.update(kept.removed)
        response = StoredResponse(conversation, kept.start, kept.input, kept.answer, kept.is_deleted)
        self._add(response)
        self._measure(response, size)
        conversation.used_at = kept.answer.created_at

    def begin(self, response: StoredResponse, turn: Turn) -> None:
        """Know a response while `turn` generates it. The journal has one in the background from now on."""
        self._running[response.answer.id] = response, turn
        if response.answer.background and self._journal is not None:
            record = record_of(response)
            self._journal.append(ResponseKey(record.id), record)

    def find_running(self, owner: str | None, response_id: str) -> tuple[StoredResponse, Turn] | None:
        """The owner's response that is being generated, and its turn; None: there is none of that id."""
        found = self._running.get(response_id)
        return None if found is None or found[0].conversation.session.owner != owner else found

    def has(self, response_id: str) -> bool:
        """Whether a response or conversation of that id is here, anybody's, or is being generated."""
        return response_id in self._responses or response_id in self._running

    def find(self, owner: str | None, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """The owner's response of that id, which may still run. Raises `NotFound`, also for another owner's, `Moved` if
        it has gone to another server with its session, `Moving` if it is on its way to one.
        """
        running = self.find_running(owner, response_id)
        if running is not None:
            return running[0]
        found = self._responses.get(response_id)
        is_there = found is not None and not found.is_deleted and not found.conversation.is_dead
        return self._require_here(found if is_there else None, owner, "response", response_id, param)

    def find_conversation(
        self, owner: str | None, conversation_id: str, *, param: str = "conversation_id"
    ) -> StoredResponse:
        """The head of the owner's conversation of that id. Raises what `find` does."""
        found = self._responses.get(conversation_id)
        is_there = found is not None and found is found.conversation.head and not found.conversation.is_dead
        return self._require_here(found if is_there else None, owner, "conversation", conversation_id, param)

    def _require_here(
        self, found: StoredResponse | None, owner: str | None, what: str, id: str, param: str
    ) -> StoredResponse:
        """What is found, if it is the owner's and stays here. Raises what `find` does."""
        if found is None or found.conversation.session.owner != owner:
            session = self._registry.keeper.homes.gone_by_response(id)
            if session is not None:
                self._registry.table.require_home(session, owner, False)
            raise NotFound(f"no {what} {id[:100]}", param=param)
        if found.conversation.session.leaving:
            raise Moving(f"{what} {id} is on its way to another server, with its session")
        return found

    def put_items(self, conversation: Conversation, items: Sequence[AnyItem], answer: ResponseObject) -> None:
        """Keep items that came without a response, and `answer` in the place of one.

        Raises `FieldOutOfRange` if they have too many bytes. Then the conversation is forgotten.
        """
        session = conversation.session
        session.used_at = time.time()
        self._registry.keeper.note(session)
        self.keep(StoredResponse(conversation, len(conversation.items), items, answer, is_deleted=True))
        if answer.id not in self._responses:
            raise FieldOutOfRange.at("items", "with them the conversation has more bytes than are kept")

    def remove_item(self, head: StoredResponse, item_id: str) -> None:
        """Take an item out of a conversation."""
        head.conversation.removed.add(item_id)
        self._items.pop((head.conversation.session.owner, item_id), None)
        self._note(head)

    def find_item(self, owner: str | None, item_id: str, *, param: str = "input") -> AnyItem:
        """The owner's item of that id, of any conversation or response that is kept, without log-probabilities. Raises
        `NotFound`.
        """
        found = self._items.get((owner, item_id))
        if found is None or found[0].is_dead or item_id in found[0].removed:
            raise NotFound(f"no item {item_id[:100]}", param=param)
        return without_logprobs(found[1])

    def keep(self, response: StoredResponse) -> None:
        """Keep a response that is over, and journal it without waiting. One whose session has closed is not kept."""
        conversation = response.conversation
        self._running.pop(response.answer.id, None)
        if conversation.is_dead:
            return
        self._conversations[conversation.id] = self._conversations.pop(conversation.id, conversation)
        self._add(response)
        self._note(response)
        self._make_room()

    async def settled(self, response: StoredResponse) -> None:
        """Return when what happened to the response, and with it to its conversation, is durable. Raises `NotDurable`
        if it could not be written.
        """
        if self._journal is not None:
            conversation = response.conversation
            keys = [ResponseKey(each) for each in (*conversation.responses, response.answer.id)]
            await self._journal.settled(conversation.session.id, *keys)

    def delete(self, response: StoredResponse) -> None:
        """Forget a response. Its conversation goes with the last one; until then its items stay for those after it."""
        conversation = response.conversation
        response.is_deleted = True
        for item in (*response.input, *response.answer.output) if conversation.head is None else ():
            self._items.pop((conversation.session.owner, item.id), None)
        is_last = conversation.head is None and all(each.is_deleted for each in conversation.responses.values())
        if is_last and not conversation.is_running:
            self.forget(conversation)
        else:
            self._note(response)

    def _add(self, response: StoredResponse) -> None:
        response.conversation.add(response)
        self._responses[response.answer.id] = response
        conversation = response.conversation
        if not response.is_deleted or conversation.head is not None:
            for item in (*response.input, *response.answer.output):
                self._items[conversation.session.owner, item.id] = conversation, item

    def _note(self, response: StoredResponse) -> None:
        record = record_of(response)
        self._measure(response, len(record.body))
        if self._journal is not None:
            self._journal.append(ResponseKey(record.id), record)

    def _measure(self, response: StoredResponse, size: int) -> None:
        self._bytes += size - response.size
        response.size = size

    def _forget_dead(self) -> None:
        for conversation in [each for each in self._conversations.values() if each.is_dead]:
            if not conversation.session.leaving:
                self.forget(conversation)

    def _make_room(self) -> None:
        self._forget_dead()
        while len(self._responses) + self._coming > self._limit:
            *_, last = self._conversations.values()
            idle = [each for each in self._of_largest(lambda each: 1) if not each.is_running and each is not last]
            if not idle:
                break
            self.forget(idle[0])
        while self._bytes + self._coming_bytes > self._max_bytes:
            # Nobody may hold more by never being idle, or in one conversation: what comes first here is only preferred.
            largest = self._of_largest(lambda each: each.size)
            if not largest:
                break
            self.forget(min(largest, key=lambda each: each.is_running))

    def _of_largest(self, size: Callable[[StoredResponse], int]) -> list[Conversation]:
        """The conversations that may be forgotten for others, in the order of their use. Their owner has the most: so
        no tenant pushes out what another one keeps. What another server may have soon is not forgotten.
        """
        sizes = Counter[str | None]()
        staying = [each for each in self._conversations.values() if not each.session.leaving]
        for each in staying:
            sizes[each.session.owner] += sum(map(size, each.responses.values()))
        if not sizes:
            return []
        [(owner, _)] = sizes.most_common(1)
        return [each for each in staying if each.session.owner == owner]

    def forget(self, conversation: Conversation) -> None:
        """Forget a conversation and its responses, with the session that was opened for it."""
        for response in self._remove(conversation):
            if self._journal is not None:
                self._journal.append(ResponseKey(response.answer.id), None)
        session = conversation.session
        if conversation.owns_session and not session.busy and self._registry.table.find(session.id) is session:
            self._registry.drop(session)

    def _remove(self, conversation: Conversation) -> list[StoredResponse]:
        """Have a conversation no more; returns the responses that it had."""
        del self._conversations[conversation.id]
        responses = list(conversation.responses.values())
        conversation.responses.clear()  # one that runs is the first of those that are kept from now on
        for response in responses:
            self._measure(response, 0)
            del self._responses[response.answer.id]
            for item in (*response.input, *response.answer.output):
                self._items.pop((conversation.session.owner, item.id), None)
        return responses


class UnstoredConversation:
    """Remembers one conversation at most, the last. Used on the event loop only."""

    def __init__(self, registry: SessionRegistry) -> None:
        self._registry = registry
        self._last: Conversation | None = None

    def find(self, response_id: str) -> StoredResponse | None:
        """The response of that id, if it belongs to the conversation."""
        return None if self._last is None else self._last.responses.get(response_id)

    def take(self, conversation: Conversation) -> None:
        """Remember another conversation in place of the one before, whose session closes."""
        if conversation is not self._last:
            self.close()
            self._last = conversation

    def close(self) -> None:
        """Forget the conversation. A session that was opened for it closes."""
        last, self._last = self._last, None
        if last is not None and last.owns_session and self._registry.table.find(last.session.id) is last.session:
            self._registry.drop(last.session)
