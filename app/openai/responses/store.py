"""The responses that the server keeps, in memory and in the journal."""

from collections import Counter
from collections.abc import Callable, Iterable

from pydantic import BaseModel

from app.bridge.turn import Turn
from app.domain.errors import NotFound
from app.journal.journal import Journal
from app.journal.records import ResponseKey, ResponseRecord
from app.openai.responses.conversation import Conversation, StoredResponse
from app.openai.responses.encoded import to_json
from app.openai.responses.items import AnyItem, Item, without_logprobs
from app.openai.responses.response import ResponseObject
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session


class _Journaled(BaseModel):
    """What the journal keeps of a response beside its ids. The first of a conversation has the items before it."""

    conversation: str
    owns_session: bool
    start: int
    before: list[Item] = []
    input: list[Item]
    answer: ResponseObject
    is_deleted: bool = False


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
        found = [(record, _Journaled.model_validate_json(record.body)) for record in self._journal.load_responses()]
        for record, kept in sorted(found, key=lambda each: (each[1].answer.created_at, each[1].start)):
            session = by_id.get(record.session)
            if session is None:
                self._journal.append(ResponseKey(record.id), None)
                continue
            conversation = self._conversations.get(kept.conversation)
            if conversation is None:
                conversation = Conversation(kept.conversation, session, True, kept.owns_session, list(kept.before))
                self._conversations[conversation.id] = conversation
            response = StoredResponse(conversation, kept.start, kept.input, kept.answer, kept.is_deleted)
            self._add(response)
            self._measure(response, len(record.body))
            conversation.used_at = kept.answer.created_at

    def begin(self, response: StoredResponse, turn: Turn) -> None:
        """Know a response while `turn` generates it."""
        self._running[response.answer.id] = response, turn

    def find_running(self, owner: str | None, response_id: str) -> tuple[StoredResponse, Turn] | None:
        """The owner's response that is being generated, and its turn; None: there is none of that id."""
        found = self._running.get(response_id)
        return None if found is None or found[0].conversation.session.owner != owner else found

    def find(self, owner: str | None, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """The owner's response of that id, which may still run. Raises `NotFound`, also for another owner's."""
        running = self.find_running(owner, response_id)
        if running is not None:
            return running[0]
        found = self._responses.get(response_id)
        if found is None or found.is_deleted or found.conversation.session.owner != owner or found.conversation.is_dead:
            raise NotFound(f"no response {response_id[:100]}", param=param)
        return found

    def find_item(self, owner: str | None, item_id: str) -> AnyItem:
        """The owner's item of that id, of any response that is kept, without log-probabilities. Raises `NotFound`."""
        found = self._items.get((owner, item_id))
        if found is None or found[0].is_dead:
            raise NotFound(f"no item {item_id[:100]}", param="input")
        return without_logprobs(found[1])

    def keep(self, response: StoredResponse) -> None:
        """Keep a response that is over, and journal it without waiting. One whose session has closed is not kept."""
        conversation = response.conversation
        self._running.pop(response.answer.id, None)
        if conversation.is_dead:
            return
        is_first = not conversation.responses
        self._conversations[conversation.id] = self._conversations.pop(conversation.id, conversation)
        self._add(response)
        self._note(response, with_items_before=is_first)
        self._make_room()

    async def settled(self, response: StoredResponse) -> None:
        """Return when what happened to the response, and with it to its conversation, is durable. Raises `NotDurable`
        if it could not be written.
        """
        if self._journal is not None:
            conversation = response.conversation
            keys = [ResponseKey(each) for each in conversation.responses]
            await self._journal.settled(conversation.session.id, *keys)

    def delete(self, response: StoredResponse) -> None:
        """Forget a response. Its conversation goes with the last one; until then its items stay for those after it."""
        conversation = response.conversation
        response.is_deleted = True
        for item in (*response.input, *response.answer.output):
            self._items.pop((conversation.session.owner, item.id), None)
        if all(each.is_deleted for each in conversation.responses.values()) and not conversation.is_running:
            self._forget(conversation)
        else:
            self._note(response, with_items_before=response is next(iter(conversation.responses.values())))

    def _add(self, response: StoredResponse) -> None:
        response.conversation.add(response)
        self._responses[response.answer.id] = response
        if not response.is_deleted:
            conversation = response.conversation
            for item in (*response.input, *response.answer.output):
                self._items[conversation.session.owner, item.id] = conversation, item

    def _note(self, response: StoredResponse, *, with_items_before: bool) -> None:
        conversation = response.conversation
        kept = _Journaled(
            conversation=conversation.id,
            owns_session=conversation.owns_session,
            start=response.start,
            before=conversation.items[: response.start] if with_items_before else [],
            input=list(response.input),
            answer=response.answer,
            is_deleted=response.is_deleted,
        )
        body = to_json(kept)
        self._measure(response, len(body))
        if self._journal is not None:
            record = ResponseRecord(response.answer.id, conversation.session.id, body)
            self._journal.append(ResponseKey(response.answer.id), record)

    def _measure(self, response: StoredResponse, size: int) -> None:
        self._bytes += size - response.size
        response.size = size

    def _make_room(self) -> None:
        for conversation in [each for each in self._conversations.values() if each.is_dead]:
            self._forget(conversation)
        while len(self._responses) > self._limit:
            *_, last = self._conversations.values()
            idle = [each for each in self._of_largest(lambda each: 1) if not each.is_running and each is not last]
            if not idle:
                break
            self._forget(idle[0])
        while self._bytes > self._max_bytes:
            # Nobody may hold more by never being idle, or in one conversation: what comes first here is only preferred.
            self._forget(min(self._of_largest(lambda each: each.size), key=lambda each: each.is_running))

    def _of_largest(self, size: Callable[[StoredResponse], int]) -> list[Conversation]:
        """The conversations that may be forgotten for others, in the order of their use. Their owner has the most: so
        nobody pushes out what another one keeps.
        """
        sizes = Counter[str | None]()
        for each in self._conversations.values():
            sizes[each.session.owner] += sum(map(size, each.responses.values()))
        [(owner, _)] = sizes.most_common(1)
        return [each for each in self._conversations.values() if each.session.owner == owner]

    def _forget(self, conversation: Conversation) -> None:
        del self._conversations[conversation.id]
        responses = list(conversation.responses.values())
        conversation.responses.clear()  # one that runs is the first of those that are kept from now on
        for response in responses:
            self._measure(response, 0)
            del self._responses[response.answer.id]
            for item in (*response.input, *response.answer.output):
                self._items.pop((conversation.session.owner, item.id), None)
            if self._journal is not None:
                self._journal.append(ResponseKey(response.answer.id), None)
        session = conversation.session
        if conversation.owns_session and not session.busy and self._registry.table.find(session.id) is session:
            self._registry.drop(session)
